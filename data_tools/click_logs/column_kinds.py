"""The columns of the public click logs. To add a data set, add an entry to DATASETS.

Criteo: https://www.kaggle.com/c/criteo-display-ad-challenge/data
Avazu: https://www.kaggle.com/c/avazu-ctr-prediction/data
"""

from typing import Dict, NamedTuple, Tuple

LABEL = "label"  # 0 or 1; files without labels do not have this column
IGNORED = "ignored"
CATEGORY = "category"  # any text
HOUR = "hour"  # YYMMDDHH; only HH is the category, because dates never repeat
INTEGER = "integer"  # becomes BUCKETS or SCALED
BUCKETS = "buckets"
SCALED = "scaled"


class Column(NamedTuple):
    """A column of a raw file: its name, and the kind of its cells."""

    name: str
    kind: str


def _columns(kind, *names):
    return tuple(Column(name, kind) for name in names)


DATASETS: Dict[str, Tuple[Column, ...]] = {
    "criteo": (
        Column("label", LABEL),
        *_columns(INTEGER, *(f"I{i}" for i in range(1, 14))),
        *_columns(CATEGORY, *(f"C{i}" for i in range(1, 27))),
    ),
    "avazu": (
        Column("id", IGNORED),
        Column("click", LABEL),
        Column("hour", HOUR),
        *_columns(CATEGORY, "C1", "banner_pos", "site_id", "site_domain", "site_category"),
        *_columns(CATEGORY, "app_id", "app_domain", "app_category", "device_id", "device_ip"),
        *_columns(CATEGORY, "device_model", "device_type", "device_conn_type"),
        *_columns(CATEGORY, *(f"C{i}" for i in range(14, 22))),
    ),
}


def fields(dataset: str, integers: str) -> Tuple[Column, ...]:
    """The columns that become fields, in the order of the records.

    Args:
        dataset: a key of DATASETS.
        integers: what integers become, BUCKETS or SCALED.
    """
    columns = (c for c in DATASETS[dataset] if c.kind not in (LABEL, IGNORED))
    return tuple(c._replace(kind=integers) if c.kind == INTEGER else c for c in columns)
