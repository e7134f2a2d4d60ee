//! Ranges of bytes as numbers: such as no memory has, and such as do not lie inside a whole.

use pdkv_core::{Error, ErrorKind, Result};

/// Where a range ends.
///
/// # Errors
/// `Region` for ranges that no memory can have.
pub(crate) fn check_range(operation: &'static str, address: u64, len: u64) -> Result<u64> {
    if len == 0 {
        return Err(Error::new(ErrorKind::Region, operation, "the range is empty"));
    }
    if address == 0 {
        return Err(Error::new(ErrorKind::Region, operation, "the address is null"));
    }
    address
        .checked_add(len)
        .filter(|&end| isize::try_from(end).is_ok())
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Region,
                operation,
                format!("`{len}` bytes at `{address:#x}` reach past the end of the address space"),
            )
        })
}

/// Whether so many bytes from an offset on lie inside a whole.
///
/// # Errors
/// `Region` when they do not.
#[inline]
pub(crate) fn check_inside(operation: &'static str, whole: u64, offset: u64, len: u64) -> Result<()> {
    if offset.checked_add(len).is_some_and(|end| end <= whole) {
        return Ok(());
    }
    Err(outside(operation, whole, offset, len))
}

#[cold]
fn outside(operation: &'static str, whole: u64, offset: u64, len: u64) -> Error {
    let message = format!("`{len}` bytes at offset `{offset}` reach past the `{whole}` bytes that there are");
    Error::new(ErrorKind::Region, operation, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_memory_has_is_refused() {
        assert_eq!(check_range("test", 16, 16).unwrap(), 32);
        for (address, len, part) in [
            (16, 0, "empty"),
            (0, 16, "null"),
            (16, u64::MAX, "`0x10`"),
            (1 << 63, 1, "past the end"),
        ] {
            let error = check_range("test", address, len).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Region);
            assert!(error.message().contains(part), "{error}");
        }
    }

    #[test]
    fn a_part_lies_inside_to_the_last_byte() {
        for (offset, len) in [(0, 0), (0, 64), (64, 0), (60, 4)] {
            check_inside("test", 64, offset, len).unwrap();
        }
        for (offset, len) in [(0, 65), (65, 0), (61, 4), (4, u64::MAX), (u64::MAX, 1)] {
            let error = check_inside("test", 64, offset, len).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Region);
            assert!(error.message().contains("`64` bytes"), "{error}");
        }
    }
}
