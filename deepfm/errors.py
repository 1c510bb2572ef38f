"""The error for what a user can fix."""


class BadInput(ValueError):
    """Wrong input or flags that the user can fix; its text is the one sentence that they see."""
