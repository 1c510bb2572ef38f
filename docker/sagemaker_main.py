"""What SageMaker's `train` runs in the image: the job's own program, else the image's train.py.

The toolkit (3.9.2) offers three ways to say "else", and each is a trap: with SAGEMAKER_PROGRAM in
the environment it ignores the program that a job names, it never reads SAGEMAKER_SUBMIT_DIRECTORY,
and with anything in /opt/ml/code it ignores the source that a job submits. So the image sets none
of them, and this fills in what the job left out.
"""

import contextlib
import os
import pathlib
import shutil
import signal

import psutil
from sagemaker_tensorflow_container import training
from sagemaker_training import environment, params

SOURCE = pathlib.Path(__file__).resolve().parent.parent


def _hand_on(number, _):
    """Sends SIGTERM to the training processes of this container, each of which saves and ends.

    Not to what started them: mpirun would leave its ranks a second.
    """
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if process.name().startswith("python"):
                process.send_signal(signal.SIGTERM)


def main():
    """Called by the toolkit, which has made environment.code_dir (/opt/ml/code).

    SageMaker stops a job with SIGTERM to `train`, which the toolkit leaves unheard, and two minutes
    later with SIGKILL.
    """
    signal.signal(signal.SIGTERM, _hand_on)
    job = environment.read_hyperparameters()
    if params.USER_PROGRAM_PARAM not in job:
        os.environ.setdefault(params.USER_PROGRAM_ENV, "train.py")
    if params.SUBMIT_DIR_PARAM not in job and not os.listdir(environment.code_dir):
        shutil.copy(SOURCE / "train.py", environment.code_dir)
        shutil.copytree(SOURCE / "deepfm", pathlib.Path(environment.code_dir, "deepfm"))
    training.main()
