//! Memory of GPUs over the local socket: the owner's process lends it by name, and the peer's maps it. A name is a handle of
//! the driver's, or a descriptor that rides beside it. What the driver maps is then checked against what the owner says of it;
//! nothing said here is an address.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use pdkv_core::id::RegionId;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::{DeviceMapping, DeviceRegion, Gpu, Handle, Laying, SharedExtent};

use crate::door::LocalDoor;
use crate::local::{Ask, Asker, FDS, refuse, word};
use crate::reply::Reply;
use crate::view::lasts;

/// What comes before a group of extents: the region's id, how many there are, and the bytes of the reason when there are none.
const HEAD: usize = 24;
/// An extent: where in the region, how long, where in its allocation, how long that is, the kind of its name, the name.
const EXTENT: usize = 104;
/// The id that ends an answer.
pub(crate) const END: u64 = u64::MAX;
/// Instead of a number of extents: the region can't be had now, and may be another time. Releases that don't know it end the answer there, and try again.
const NOT_NOW: u64 = u64::MAX;
/// How much longer an answer may take for each extent that has come.
const EXTENT_PATIENCE: Duration = Duration::from_millis(1);
/// Bytes of a reason.
const MAX_REASON: usize = 1 << 10;

/// An answer of whoever lends, which is being read.
pub(crate) struct Answer<'a>(pub(crate) Reply<'a>);

impl LocalDoor {
    /// Borrows regions of the peer's GPUs for one of ours; says of each, once, what came of it.
    ///
    /// # Errors
    /// `PeerUnreachable`, `PeerLost`, `Handshake`, `Capacity` when it answers enough questions of ours, `TransferCancelled` when told to stop; regions that nothing was said of come to
    /// nothing.
    pub(crate) fn borrow(
        &self,
        gpu: &Gpu,
        wanted: &[(RegionId, u64)],
        stopped: &dyn Fn() -> bool,
        mut settle: impl FnMut(RegionId, Result<Arc<DeviceMapping>>),
    ) -> Result<()> {
        let mut answer = Answer(self.question(Ask::Lend, wanted, stopped)?);
        let mut sizes: BTreeMap<RegionId, u64> = wanted.iter().copied().collect();
        loop {
            let head = answer.head()?;
            if head.id == END {
                return Ok(());
            }
            // Each once: an owner can't keep us here for ever.
            let id = RegionId(head.id);
            let size = sizes
                .remove(&id)
                .ok_or_else(|| refuse("a region came that was not asked for"))?;
            match answer.region(gpu, head, size) {
                Ok(outcome) => settle(id, outcome),
                Err(error) => {
                    let rest = refuse(&format!("region `{id}` can't be mapped: {}", error.message()));
                    settle(id, Err(error));
                    return Err(rest);
                }
            }
        }
    }
}

/// What comes before a group of extents.
pub(crate) struct Head {
    pub(crate) id: u64,
    /// Extents that follow; 0 when the region can't be had.
    pub(crate) count: usize,
    /// Whether it can't be had for the moment only.
    pub(crate) not_now: bool,
    pub(crate) reason: String,
}

impl Head {
    /// Why the region can't be had.
    fn refusal(&self) -> Error {
        let now = if self.not_now { " now" } else { "" };
        let text = format!("the peer can't share region `{}`{now}: {}", self.id, self.reason);
        if self.not_now {
            Error::new(ErrorKind::Transfer, "cuda", text).with_hint("it is asked for again in some seconds")
        } else {
            Error::new(ErrorKind::Unsupported, "cuda", text)
        }
    }
}

impl Answer<'_> {
    /// Takes one region in, group by group, the first of which has been announced: descriptors of one group are gone before
    /// those of the next one come. An extent that can't be is the end of the answer, for more of its kind may follow.
    fn region(&mut self, gpu: &Gpu, mut head: Head, size: u64) -> Result<Result<Arc<DeviceMapping>>> {
        let mut laying = Laying::new(gpu, size)?;
        let (id, mut reached) = (head.id, 0_u64);
        loop {
            if head.count == 0 {
                return Ok(Err(head.refusal()));
            }
            for extent in self.extents(head.count)? {
                laying.add(&extent)?;
                reached += extent.len;
            }
            if reached >= size {
                return Ok(laying.finish());
            }
            self.0.bear_with(EXTENT_PATIENCE * head.count as u32);
            head = self.head()?;
            if head.id != id {
                return Err(refuse("a region came before the one before it was whole"));
            }
        }
    }

    pub(crate) fn head(&mut self) -> Result<Head> {
        let mut head = [0; HEAD];
        self.0.fill(&mut head)?;
        let not_now = word(&head, 8) == NOT_NOW;
        let (count, reason) = (word(&head, 8) as usize, word(&head, 16) as usize);
        let count = if not_now { 0 } else { count };
        if count > FDS || reason > MAX_REASON {
            return Err(refuse("a group of extents is too large"));
        }
        let mut text = vec![0; reason];
        self.0.fill(&mut text)?;
        Ok(Head {
            id: word(&head, 0),
            count,
            not_now,
            reason: String::from_utf8_lossy(&text).into_owned(),
        })
    }

    fn extents(&mut self, count: usize) -> Result<Vec<SharedExtent>> {
        let mut raw = vec![0; count * EXTENT];
        let mut fds = self.0.fill(&mut raw)?.into_iter();
        let extents = raw.chunks_exact(EXTENT).map(|entry| decode(entry, &mut fds));
        let extents = extents.collect::<Result<Vec<_>>>()?;
        if fds.next().is_some() {
            return Err(refuse("descriptors and extents don't match"));
        }
        Ok(extents)
    }
}

fn decode(entry: &[u8], fds: &mut impl Iterator<Item = OwnedFd>) -> Result<SharedExtent> {
    let mut name = [0; 64];
    name.copy_from_slice(&entry[40..EXTENT]);
    let handle = match word(entry, 32) {
        0 => Handle::Ipc(name),
        1 => Handle::Fd(
            fds.next()
                .ok_or_else(|| refuse("descriptors and extents don't match"))?,
        ),
        2 => Handle::Fabric(name),
        _ => return Err(refuse("a name is of no kind that this release knows")),
    };
    Ok(SharedExtent {
        region_offset: word(entry, 0),
        len: word(entry, 8),
        offset: word(entry, 16),
        allocation_len: word(entry, 24),
        handle,
    })
}

fn encode(extent: &SharedExtent, out: &mut Vec<u8>) {
    for word in [extent.region_offset, extent.len, extent.offset, extent.allocation_len] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    let (kind, name) = match &extent.handle {
        Handle::Ipc(name) => (0_u64, *name),
        Handle::Fd(_) => (1, [0; 64]),
        Handle::Fabric(name) => (2, *name),
    };
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&name);
}

/// Lends the regions of our GPUs that the peer asks for.
pub(crate) fn lend(asker: &Asker<'_>) -> Result<()> {
    for id in asker.wanted()? {
        let Ok(region) = asker.shared.registry.region_for(asker.peer, id) else {
            continue;
        };
        lend_region(asker, id, region.memory.device().map(|device| &**device))?;
    }
    send_head(asker, END, 0, "")
}

fn lend_region(asker: &Asker<'_>, id: RegionId, region: Option<&DeviceRegion>) -> Result<()> {
    let Some(region) = region else {
        return send_head(asker, id.0, 0, "it is memory of the host");
    };
    // Names are of what is there now.
    if let Err(error) = region.still_there() {
        return send_refusal(asker, id, &error);
    }
    let mut offset = 0;
    while offset < region.len() {
        // Exported for each who asks, a group at a time: descriptors that nobody takes are not kept.
        let group = match region.share_from(offset, FDS) {
            Ok(group) if !group.is_empty() => group,
            Ok(_) => return send_head(asker, id.0, 0, "its allocations can't be told"),
            Err(error) => return send_refusal(asker, id, &error),
        };
        send_head(asker, id.0, group.len() as u64, "")?;
        let mut bytes = Vec::with_capacity(group.len() * EXTENT);
        let mut fds = Vec::new();
        for extent in &group {
            encode(extent, &mut bytes);
            if let Handle::Fd(fd) = &extent.handle {
                fds.push(fd.as_fd());
            }
            offset = extent.region_offset + extent.len;
        }
        asker.send(&bytes, &fds)?;
    }
    Ok(())
}

/// Says why a region can't be lent: never, or not now, when a call of the driver has failed that may go well the next time.
pub(crate) fn send_refusal(asker: &Asker<'_>, id: RegionId, error: &Error) -> Result<()> {
    let extents = if lasts(error) { 0 } else { NOT_NOW };
    send_head(asker, id.0, extents, error.message())
}

pub(crate) fn send_head(asker: &Asker<'_>, id: u64, extents: u64, reason: &str) -> Result<()> {
    let mut end = reason.len().min(MAX_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = Vec::with_capacity(HEAD + end);
    for word in [id, extents, end as u64] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    bytes.extend_from_slice(&reason.as_bytes()[..end]);
    asker.send(&bytes, &[])
}
