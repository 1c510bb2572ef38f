"""What the modes share: the class Mode, devices, and what processes know of each other."""
