"""SageMaker's own images by region, and the GPUs of its hosts."""

import re

from programs import BadInput

# The accounts that hold the images, from the SDK (sagemaker 2.183.0, image_uri_config/*.json).
_TENSORFLOW = {
    **dict.fromkeys((
        "ap-northeast-1", "ap-northeast-2", "ap-south-1", "ap-southeast-1", "ap-southeast-2",
        "ca-central-1", "eu-central-1", "eu-north-1", "eu-west-1", "eu-west-2", "eu-west-3",
        "sa-east-1", "us-east-1", "us-east-2", "us-west-1", "us-west-2",
    ), "763104351884"),
    "af-south-1": "626614931356", "ap-east-1": "871362719292", "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452", "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322", "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807", "eu-central-2": "380420809688", "eu-south-1": "692866216735",
    "eu-south-2": "503227376785", "il-central-1": "780543022126", "me-central-1": "914824155844",
    "me-south-1": "217643126080", "us-gov-east-1": "446045086412", "us-gov-west-1": "442386744353",
    "us-iso-east-1": "886529160074", "us-isob-east-1": "094389454867",
}  # fmt: skip
_SPARK = {
    "af-south-1": "309385258863", "ap-east-1": "732049463269", "ap-northeast-1": "411782140378",
    "ap-northeast-2": "860869212795", "ap-northeast-3": "102471314380",
    "ap-south-1": "105495057255", "ap-southeast-1": "759080221371",
    "ap-southeast-2": "440695851116", "ap-southeast-3": "732049463269",
    "ca-central-1": "446299261295", "cn-north-1": "671472414489", "cn-northwest-1": "844356804704",
    "eu-central-1": "906073651304", "eu-north-1": "330188676905", "eu-south-1": "753923664805",
    "eu-west-1": "571004829621", "eu-west-2": "836651553127", "eu-west-3": "136845547031",
    "me-south-1": "750251592176", "sa-east-1": "737130764395", "us-east-1": "173754725891",
    "us-east-2": "314815235551", "us-gov-west-1": "271483468897", "us-west-1": "667973535471",
    "us-west-2": "153931337802",
}  # fmt: skip
_DOMAINS = {"cn": "amazonaws.com.cn", "us-iso": "c2s.ic.gov", "us-isob": "sc2s.sgov.gov"}
_IMAGES = {
    "TensorFlow 1.15.2": (_TENSORFLOW, "tensorflow-training:1.15.2-{device}-py37"),
    "Spark 3.3": (_SPARK, "sagemaker-spark-processing:3.3-cpu"),
}
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
    """The address of SageMaker's own image, TENSORFLOW or SPARK; refuses a region without it."""
    accounts, name = _IMAGES[title]
    if region not in accounts:
        raise BadInput(
            f"--region={region}: no image of SageMaker's for {title} is known there; give "
            "--image_uri, or a region such as us-east-1."
        )
    domain = _DOMAINS.get(re.sub("-[a-z]+-[0-9]+$", "", region), "amazonaws.com")
    name = name.format(device="gpu" if type_.startswith(("ml.g", "ml.p")) else "cpu")
    return f"{accounts[region]}.dkr.ecr.{region}.{domain}/{name}"


def gpus(type_: str, own_image: bool, processes) -> int:
    """The GPUs of a host; 0: it trains on its CPUs.

    Refuses what SageMaker's image has no code for, and a type that may have any number of GPUs
    unless the user says how many `processes` a host runs.
    """
    _, family, size = type_.split(".")
    card, capability, sizes = GPUS.get(family, (None, 0, {}))
    if capability > _NEWEST and not own_image:
        raise BadInput(
            f"--instance_type={type_}: SageMaker's image for {TENSORFLOW} has no code for {card}; "
            "give --image_uri, an image that has, or a type of ml.g4dn or ml.p3."
        )
    if size not in sizes and not re.match("[cmrtxz][0-9]", family) and not processes:
        raise BadInput(
            f"--instance_type={type_} is not known here; say how many GPUs it has with "
            "--processes_per_host, or try ml.p3.8xlarge."
        )
    return sizes.get(size, 0)
