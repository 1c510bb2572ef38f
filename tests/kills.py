"""Ends what a test does before one of the changes that it makes."""

import contextlib


def interrupt():
    raise KeyboardInterrupt


@contextlib.contextmanager
def killed_after(monkeypatch, left, *functions, end=interrupt):
    """Lets the block call functions, (module, name) each, `left` times in all; `end` instead of the
    next call ends it."""

    def counted(change):
        def do(*args, **named):
            nonlocal left
            left -= 1
            if left < 0:
                end()
            return change(*args, **named)

        return do

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        for module, name in functions:
            patch.setattr(module, name, counted(getattr(module, name)))
        yield
