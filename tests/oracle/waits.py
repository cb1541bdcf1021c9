"""What makes the host wait for a GPU, told from the operations that a CPU is asked for."""

import torch

TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def host_waits(function, args):
    """Whether an operation reads a number, or has a result whose shape only the numbers tell.

    `aten::_local_scalar_dense` and `aten::nonzero` are such; indexing is, where a mask chooses.
    """
    if function in INDEXED:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return not TAGS.isdisjoint(function.tags)
