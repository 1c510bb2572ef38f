"""SageMaker's own images, and the GPUs of its hosts."""

import re

from absl import flags
from programs import BadInput

FLAGS = flags.FLAGS

_IMAGES = {  # title: what the SDK finds the image by
    "TensorFlow 1.15.2": {
        "framework": "tensorflow", "version": "1.15.2", "py_version": "py37",
        "image_scope": "training",
    },
    "Spark 3.3": {"framework": "spark", "version": "3.3", "image_scope": "processing"},
}  # fmt: skip
TENSORFLOW, SPARK = _IMAGES

_NEWEST = 7.5  # compute capability that CUDA 10.0, which the image has, compiles for
_ONE = dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1)
_G5 = {**_ONE, "12xlarge": 4, "24xlarge": 4, "48xlarge": 8}
GPUS = {  # family: (card, its compute capability, {size: cards})
    "p2": ("K80", 3.7, {"xlarge": 1, "8xlarge": 8, "16xlarge": 16}),
    "p3": ("V100", 7.0, {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8}),
    "p3dn": ("V100", 7.0, {"24xlarge": 8}),
    "p4d": ("A100", 8.0, {"24xlarge": 8}),
    "p4de": ("A100", 8.0, {"24xlarge": 8}),
    "p5": ("H100", 9.0, {"4xlarge": 1, "48xlarge": 8}),
    "p5e": ("H200", 9.0, {"48xlarge": 8}),
    "p5en": ("H200", 9.0, {"48xlarge": 8}),
    "g4dn": ("T4", 7.5, {**_ONE, "12xlarge": 4}),
    "g5": ("A10G", 8.6, _G5),
    "g6": ("L4", 8.9, _G5),
    "g6e": ("L40S", 8.9, _G5),
}


def image(title: str, region: str, type_: str) -> str:
    """--image_uri, or the address of SageMaker's own image, TENSORFLOW or SPARK."""
    from sagemaker import image_uris

    try:
        return FLAGS.image_uri or image_uris.retrieve(
            region=region, instance_type=type_, **_IMAGES[title]
        )
    except ValueError as error:
        raise BadInput(
            f"--region={region}: no image of SageMaker's for {title} is known there; give "
            "--image_uri, or a region such as us-east-1."
        ) from error


def gpus(type_: str) -> int:
    """The GPUs of a host; 0: it trains on its CPUs.

    Refuses what SageMaker's image has no code for, and without --processes_per_host a type that may
    have any number of GPUs.
    """
    _, family, size = type_.split(".")
    card, capability, sizes = GPUS.get(family, (None, 0, {}))
    if capability > _NEWEST and not FLAGS.image_uri:
        raise BadInput(
            f"--instance_type={type_}: SageMaker's image for {TENSORFLOW} has no code for {card}; "
            "give --image_uri, an image that has, or a type of ml.g4dn or ml.p3."
        )
    without = re.match("[cmrtxz][0-9]", family)
    if size not in sizes and not without and not FLAGS.processes_per_host:
        raise BadInput(
            f"--instance_type={type_} is not known here; say how many GPUs it has with "
            "--processes_per_host, or try ml.p3.8xlarge."
        )
    return sizes.get(size, 0)
