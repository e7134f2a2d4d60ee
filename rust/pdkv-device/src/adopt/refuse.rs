//! Everything that makes moving a range unsafe, looked for before a byte moves.

use std::fs;

use pdkv_core::{Error, ErrorKind, Result};

use super::{OPERATION, children, vma};
use crate::cuda;

/// Refuses with the first reason found; `first..last` are whole pages.
pub(super) fn unsafe_to_move(first: u64, last: u64) -> Result<()> {
    for vma in vma::covering(first, last)? {
        if let Some(reason) = vma.refusal() {
            return Err(refused(format!(
                "memory at `{:#x}..{:#x}` {reason}",
                vma.start.max(first),
                vma.end.min(last)
            )));
        }
    }
    if cuda::knows(first) || cuda::knows(last - 1) {
        return Err(refused(format!(
            "memory at `{first:#x}` is registered with the CUDA driver"
        )));
    }
    let pinned = pinned_kib(&fs::read_to_string("/proc/self/status").unwrap_or_default());
    if pinned > 0 {
        return Err(refused(format!(
            "this process has `{pinned}` KiB pinned for DMA, and the kernel does not tell whether these pages are among them"
        )));
    }
    if let Some(child) = children::sharing(first, last) {
        return Err(refused(format!(
            "process `{child}`, forked from this one, still shares its pages"
        ))
        .with_hint("adopt before forking, or start children with `spawn`"));
    }
    Ok(())
}

fn refused(message: String) -> Error {
    Error::new(ErrorKind::Unsupported, OPERATION, message)
        .with_hint("register the memory without adopting it: the peer copies through the kernel then")
}

/// `VmPin` of a status text, in KiB.
fn pinned_kib(status: &str) -> u64 {
    status
        .lines()
        .find_map(|line| line.strip_prefix("VmPin:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_pages_are_read_from_the_status() {
        assert_eq!(pinned_kib("VmLck:\t 4 kB\nVmPin:\t    128 kB\nVmHWM: 9 kB\n"), 128);
        assert_eq!(pinned_kib("VmLck:\t 4 kB\n"), 0);
    }
}
