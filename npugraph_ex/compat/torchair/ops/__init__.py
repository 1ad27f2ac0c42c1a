"""`from torchair.ops import npu_create_tagged_event`, as TorchAir's guides write it; re-exports and nothing else."""

from npugraph_ex.compat.torchair_names import getattr_of
from npugraph_ex.ops import (
    npu_create_tagged_event,
    npu_record_tagged_stream,
    npu_tagged_event_record,
    npu_tagged_event_wait,
)

__all__ = ["npu_create_tagged_event", "npu_record_tagged_stream", "npu_tagged_event_record", "npu_tagged_event_wait"]
__getattr__ = getattr_of("ops", __all__)
