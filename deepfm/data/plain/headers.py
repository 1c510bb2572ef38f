"""The bytes between the numbers of a serialized tf.train.Example; they depend on lengths alone.

https://developers.google.com/protocol-buffers/docs/encoding
"""

FLOAT_LIST, INT64_LIST = 2, 3  # the numbers of these fields in a tf.train.Feature


def list_header(name: bytes, field: int, size: int) -> bytes:
    """What precedes `size` bytes of numbers in a tf.train.Features: entry, key, feature, list."""
    packed = tag(1, size) if size else b""
    return before_list(name, field, len(packed) + size) + packed


def before_list(name: bytes, field: int, size: int) -> bytes:
    """The header of a list of `size` bytes in a tf.train.Features: entry, key and feature."""
    feature = tag(field, size)
    entry = tag(1, len(name)) + name + tag(2, len(feature) + size) + feature
    return tag(1, len(entry) + size) + entry


def tag(field: int, size: int) -> bytes:
    """The header of `size` bytes of a protocol buffer's field: its number and the size."""
    head = bytearray([field << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size])
