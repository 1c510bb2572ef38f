#!/bin/sh
# What launchers start in place of Python; see warm.py beside this.
exec "$WARM_PYTHON" -S "$(dirname "$0")/warm.py" --stand_in "$@"
