//! The raw `process_vm_readv` loop, 1,024 spans a call.

use std::time::Duration;

use pdkv_core::{Error, ErrorKind, Result};

use super::{BATCH, same_length, timed};
use crate::os::last_errno;
use crate::process::Process;
use crate::region::HostRegion;

/// Reads blocks of another process into a region and tells how long it took.
///
/// # Errors
/// `Region` when a block does not lie inside or isn't mapped there, `Config` for lists of unequal length
/// or a bad thread count, `Unsupported` and `PeerLost` as [`CmaBatch::read`](crate::CmaBatch::read).
pub fn cma_read(
    process: &Process,
    local: &HostRegion,
    local_offsets: &[u64],
    remote_addresses: &[u64],
    block_bytes: u64,
    threads: usize,
) -> Result<Duration> {
    const OPERATION: &str = "limit_cma";
    same_length(OPERATION, local_offsets.len(), remote_addresses.len())?;
    for &offset in local_offsets {
        local.target(OPERATION, offset, block_bytes)?;
    }
    let (base, len) = (local.address(), block_bytes as usize);
    let span = |address: u64| libc::iovec {
        iov_base: std::ptr::with_exposed_provenance_mut(address as usize),
        iov_len: len,
    };
    timed(OPERATION, local_offsets.len(), threads, |_, part| {
        let (mut here, mut there) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        let blocks = local_offsets[part.clone()]
            .chunks(BATCH)
            .zip(remote_addresses[part].chunks(BATCH));
        for (offsets, addresses) in blocks {
            here.clear();
            here.extend(offsets.iter().map(|&offset| span(base + offset)));
            there.clear();
            there.extend(addresses.iter().map(|&address| span(address)));
            let count = here.len() as libc::c_ulong;
            // SAFETY: every local block was checked above against the live region; remote addresses are only
            // used in the other process.
            let moved =
                unsafe { libc::process_vm_readv(process.raw_pid(), here.as_ptr(), count, there.as_ptr(), count, 0) };
            if moved < 0 {
                return Err(process.refused(OPERATION, last_errno()));
            }
            if moved.unsigned_abs() != len * here.len() {
                let message = format!("only `{moved}` bytes of a call came: a block isn't mapped there");
                return Err(Error::new(ErrorKind::Region, OPERATION, message));
            }
        }
        Ok(())
    })
}
