"""What a lookup buffer needs to know of tensors: the tokens that a mask leaves, and how many bytes it holds.

Takes torch tensors and numpy arrays alike. torch is never imported here: whoever gives a torch tensor has imported it.
"""

from __future__ import annotations

from typing import Any

from pdkv.errors import IntegrityError, LayoutError, UnsupportedError

__all__ = ["check_match", "check_sendable", "keys_of", "mask_of", "nbytes_of"]


def keys_of(tokens: Any | None, roi: Any | None, operation: str) -> Any:
    """The tokens that count: those under the mask, as a one-dimensional numpy array of int64.

    Args:
        tokens: [n] integers; `None` is none at all.
        roi: [n] the mask: booleans, or numbers of which those above 0.5 count. `None` counts all.
        operation: Whom errors name.

    Raises:
        LayoutError: Not one dimension of integers, or a mask of another length.
    """
    import numpy as np

    if tokens is None:
        return np.empty(0, np.int64)
    array = _array(tokens, "tokens", operation)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise LayoutError(
            f"the tokens are `{array.dtype}` of shape `{list(array.shape)}`",
            operation=operation,
            hint="give one dimension of integers",
        )
    mask = mask_of(roi, len(array), operation)
    # Copied in any case: the caller's memory may change while the entry waits.
    return array.astype(np.int64) if mask is None else array[mask].astype(np.int64)


def check_match(keys: Any | None, tokens: Any | None, roi: Any | None, matched: int) -> None:
    """Checks the producer's word that an entry is one that was asked for.

    Args:
        keys: What was asked for; `None` for anything.
        tokens: The entry's.
        roi: The entry's.
        matched: How many tokens are said to agree.

    Raises:
        IntegrityError: It is not so.
        LayoutError: The entry's tokens or mask can't be.
    """
    theirs = keys_of(tokens, roi, "drop_select")
    shared = len(theirs) if keys is None else min(len(keys), len(theirs))
    # A request for anything may get an entry of no tokens, one for tokens may not.
    agree = keys is None or (shared > 0 and bool((keys[:shared] == theirs[:shared]).all()))
    if matched != shared or not agree:
        raise IntegrityError("the entry that came is not one that was asked for", operation="drop_select")


def check_sendable(tensor: Any | None) -> None:
    """Checks that a tensor can be sent at all, so that its owner learns it and not the first who asks for it.

    Raises:
        UnsupportedError: A sparse or quantized tensor, objects, structures or dates as elements.
    """
    from pdkv.pipe.tensors import describe

    # What lies on a device is described when it has been fetched; what is conjugated on reading would be copied here.
    if tensor is not None and getattr(tensor, "is_cpu", True) and not _is_lazy(tensor):
        name = describe(tensor).dtype
        if name is None or not name.replace("_", "").isalnum():
            text = f"a tensor of dtype `{name}`"
            raise UnsupportedError(text, operation="insert", hint="view it as integers")


def mask_of(roi: Any | None, length: int, operation: str) -> Any | None:
    """The mask as numpy booleans, or `None` where all tokens count.

    Raises:
        LayoutError: Its shape is not that of the tokens.
    """
    if roi is None:
        return None
    if not hasattr(roi, "dtype"):
        raise _no_tensor("roi", roi, operation)
    array = _array(roi if str(roi.dtype).endswith("bool") else roi > 0.5, "roi", operation)
    if array.shape != (length,):
        raise LayoutError(
            f"the mask has the shape `{list(array.shape)}`, the tokens `[{length}]`",
            operation=operation,
            hint="give one value for each token, or None",
        )
    return array


def nbytes_of(tensor: Any | None, operation: str) -> int:
    """Bytes of a tensor's elements; none for `None`.

    Raises:
        LayoutError: It is no tensor.
    """
    if tensor is None:
        return 0
    # A torch tensor, or what numpy and its like are known by.
    if hasattr(tensor, "element_size"):
        return int(tensor.element_size() * tensor.numel())
    if hasattr(tensor, "__array_interface__"):
        return int(tensor.nbytes)
    raise LayoutError(
        f"`{type(tensor).__name__}` is no tensor",
        operation=operation,
        hint="give a torch tensor, a numpy array or None",
    )


def _array(tensor: Any, what: str, operation: str) -> Any:
    import numpy as np

    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().numpy()
    if not hasattr(tensor, "__array_interface__"):
        raise _no_tensor(what, tensor, operation)
    return np.asarray(tensor)


def _no_tensor(what: str, found: object, operation: str) -> LayoutError:
    text = f"`{what}` is a `{type(found).__name__}`"
    return LayoutError(text, operation=operation, hint="give a torch tensor or a numpy array")


def _is_lazy(tensor: Any) -> bool:
    return bool(hasattr(tensor, "is_conj") and (tensor.is_conj() or tensor.is_neg()))
