"""The layers: the three terms of DeepFM, and what their variables start from."""
