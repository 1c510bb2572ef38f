"""What a user has to mend."""


class BadInput(ValueError):
    """Input or flags that the user has to mend; its text is the one sentence that they see."""
