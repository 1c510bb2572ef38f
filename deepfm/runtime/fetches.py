"""What a step fetches is made ready once, and not in every step."""

import tensorflow as tf

v1 = tf.compat.v1


class FetchesOfSteps(v1.train.SessionRunHook):
    """Makes what a step fetches ready once, and not in every step.

    Session.run looks up all that it is to fetch, and whether the graph has grown, each time anew,
    while the processors wait for the next step. What is no step of a MonitoredSession, or is fed
    or traced, it fetches as before.
    """

    def __init__(self):
        self.ready = {}  # _identity of fetches -> (what fetches them, the fetches)

    def after_create_session(self, session, coord):
        run, ready = session.run, self.ready
        ready.clear()  # of a session that was lost

        def run_again(fetches, feed_dict=None, options=None, run_metadata=None):
            of_step = isinstance(fetches, dict) and "caller" in fetches
            if feed_dict or not of_step or (options is not None and options.ByteSize()):
                return run(fetches, feed_dict, options, run_metadata)
            key = _identity(fetches)
            if key not in ready:
                if len(ready) == _KINDS_OF_STEPS:
                    ready.clear()
                # With `fetches`: while these are kept, others cannot get their identities.
                ready[key] = session.make_callable(fetches), fetches
            return session._do_call(ready[key][0])  # so errors tell what Session.run's do

        session.run = run_again

    def end(self, session):
        # Or the session, and all that its variables take, would stay.
        session.__dict__.pop("run", None)
        self.ready.clear()


_KINDS_OF_STEPS = 16  # that fetches are kept ready for


def _identity(fetches):
    """Equal for fetches that are the same objects in lists and dicts of the same form."""
    if isinstance(fetches, (list, tuple)):
        return (type(fetches), *map(_identity, fetches))
    if isinstance(fetches, dict):
        return (type(fetches), *((key, _identity(fetches[key])) for key in fetches))
    return fetches if isinstance(fetches, str) else id(fetches)
