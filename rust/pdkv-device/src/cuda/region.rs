//! A range of GPU memory that pdkv may copy into and out of.
//!
//! As with [`HostRegion`](crate::HostRegion), nobody gets a slice: copies are by offset and checked. What lies under a range may be one
//! allocation, or many that somebody mapped side by side (torch's expandable segments).

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use pdkv_core::{Error, ErrorKind, Result};

use super::facts::{MemoryKind, allocation_of, pointer_facts};
use super::gpu::{Gpu, managed};
use super::mapping::DeviceMapping;
use super::memory::{DeviceBuffer, fill, get, put};
use super::verdict::{is_dead, judged, lasts};
use super::vmm::{self, Reservation};
use super::witness::{self, Witness};
use crate::range::{check_inside, check_range};

/// GPU memory with a stable address and length; shared as `Arc<DeviceRegion>`.
pub struct DeviceRegion {
    gpu: Gpu,
    address: u64,
    len: u64,
    backing: Backing,
    reached: Reached,
    /// Of somebody else's memory: some of its addresses, and which memory was there.
    witnesses: Vec<Witness>,
}

/// Other GPUs, by their numbers, that were given access, and why they could not be.
type Reached = Mutex<Vec<(u32, Result<()>)>>;

/// What keeps the bytes.
pub(super) enum Backing {
    /// Memory of our own, freed with the region; it lives on as long as another process has it mapped.
    #[expect(dead_code, reason = "held for its drop")]
    Laid(Reservation),
    /// Memory of our own where descriptors name none.
    #[expect(dead_code, reason = "held for its drop")]
    Own(DeviceBuffer),
    /// Somebody else's memory; the keeper is dropped with the region.
    #[expect(dead_code, reason = "held for its drop")]
    Foreign(Box<dyn Any + Send + Sync>),
    /// The region that this one is a part of.
    Whole(Arc<DeviceRegion>),
    /// Memory of another process.
    Peer(Arc<DeviceMapping>),
}

impl std::fmt::Debug for DeviceRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceRegion")
            .field("gpu", &self.gpu.ordinal())
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// An allocation under a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) base: u64,
    pub(super) len: u64,
    /// Whether CUDA IPC names it.
    pub(super) ipc: bool,
}

/// Memory is shared by whole allocations: one of ours holds nobody else's bytes.
const OWN_GRAIN: u64 = 2 << 20;

impl DeviceRegion {
    /// Allocates zeroed memory that a peer on this host can map, by a descriptor where the device has such memory. Freeing it waits for all that the
    /// device was asked, and breaks a CUDA graph that is being captured, as `cudaFree` does.
    ///
    /// # Errors
    /// `Region` for an empty or impossible length, `Device` when there is no room.
    pub fn allocate(gpu: &Gpu, len: u64) -> Result<Arc<Self>> {
        check_range("allocate", OWN_GRAIN, len)?;
        let context = gpu.context();
        let (address, backing) = if let Ok(laid) = vmm::allocate(context.device(), context, len) {
            (laid.address(), Backing::Laid(laid))
        } else {
            let buffer = DeviceBuffer::new(context, len.next_multiple_of(OWN_GRAIN) as usize)?;
            (buffer.address(), Backing::Own(buffer))
        };
        fill(gpu.stream(), address, 0, len as usize)?;
        gpu.stream().synchronize()?;
        Ok(Arc::new(Self {
            gpu: gpu.clone(),
            address,
            len,
            backing,
            reached: Reached::default(),
            witnesses: Vec::new(),
        }))
    }

    /// Wraps memory that somebody else allocated. `keep` is dropped with the region.
    ///
    /// # Errors
    /// `Region` for an empty range, or one that the driver does not know as this GPU's from end to end; `Unsupported` for managed memory.
    ///
    /// # Safety
    /// The memory must stay allocated until `keep` is dropped.
    pub unsafe fn from_raw(gpu: &Gpu, address: u64, len: u64, keep: Box<dyn Any + Send + Sync>) -> Result<Arc<Self>> {
        let pieces = pieces(gpu, address, len, usize::MAX)?;
        let witnesses = witness::witnesses(gpu.context(), &pieces)?;
        Ok(Arc::new(Self {
            gpu: gpu.clone(),
            address,
            len,
            backing: Backing::Foreign(keep),
            reached: Reached::default(),
            witnesses,
        }))
    }

    /// Memory of another process as a region, which keeps the mapping.
    pub(super) fn of_peer(mapping: Arc<DeviceMapping>) -> Arc<Self> {
        Arc::new(Self {
            gpu: mapping.gpu().clone(),
            address: mapping.address(),
            len: mapping.len(),
            backing: Backing::Peer(mapping),
            reached: Reached::default(),
            witnesses: Vec::new(),
        })
    }

    /// A region of `len` bytes of this one from `offset` on. It keeps this one alive.
    ///
    /// # Errors
    /// `Region` when the range is empty or does not lie inside.
    pub fn part(self: &Arc<Self>, offset: u64, len: u64) -> Result<Arc<Self>> {
        let address = self.at("part", offset, len)?;
        check_range("part", address, len)?;
        Ok(Arc::new(Self {
            gpu: self.gpu.clone(),
            address,
            len,
            backing: Backing::Whole(Arc::clone(self)),
            reached: Reached::default(),
            witnesses: Vec::new(),
        }))
    }

    /// Its GPU; for memory of another process, the one through which this process reaches it.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the memory is another process's.
    pub fn of_another_process(&self) -> bool {
        match &self.backing {
            Backing::Whole(whole) => whole.of_another_process(),
            Backing::Peer(_) => true,
            Backing::Laid(_) | Backing::Own(_) | Backing::Foreign(_) => false,
        }
    }

    /// Whether the memory is a GPU's own: what another one reaches of it goes over a link.
    pub fn lies_on(&self, gpu: &Gpu) -> bool {
        match &self.backing {
            Backing::Whole(whole) => whole.lies_on(gpu),
            Backing::Peer(mapping) => mapping.lies_on(gpu),
            Backing::Laid(_) | Backing::Own(_) | Backing::Foreign(_) => self.gpu.ordinal() == gpu.ordinal(),
        }
    }

    /// Whether it is memory that somebody else allocated and may replace.
    pub fn may_move(&self) -> bool {
        !self.witnesses().is_empty()
    }

    /// Whether the memory is still the one that was registered. Of several regions it is asked once, of
    /// [`Witnesses`](super::Witnesses).
    ///
    /// # Errors
    /// `Region` when it is not, `Device` when the driver fails.
    pub fn still_there(&self) -> Result<()> {
        witness::check(self.gpu.context(), self.witnesses())
    }

    /// Some of its addresses, and which memory was there; of memory of pdkv's own none.
    pub(super) fn witnesses(&self) -> &[Witness] {
        match &self.backing {
            Backing::Whole(whole) => whole.witnesses(),
            _ => &self.witnesses,
        }
    }

    /// Makes the memory one that the kernels of a GPU reach.
    ///
    /// # Errors
    /// `Unsupported` when they do not and never will, `Device` when a call of the driver failed that may go well another time.
    pub fn reached_by(&self, gpu: &Gpu) -> Result<()> {
        if self.gpu.is(gpu) {
            return Ok(());
        }
        if let Backing::Whole(whole) = &self.backing {
            return whole.reached_by(gpu);
        }
        gpu.reaches(&self.gpu)?;
        if gpu.ordinal() == self.gpu.ordinal() {
            return Ok(());
        }
        if matches!(self.backing, Backing::Peer(_)) {
            let message = "another process's memory is mapped for one GPU at a time";
            return Err(Error::new(ErrorKind::Unsupported, "use GPU memory", message));
        }
        let mut reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = reached.iter().find(|(ordinal, _)| *ordinal == gpu.ordinal()) {
            return known.clone();
        }
        let found = self.allow(gpu.ordinal()).map_err(judged);
        if found.as_ref().err().is_none_or(lasts) {
            reached.push((gpu.ordinal(), found.clone()));
        }
        found
    }

    /// Gives a GPU that has peer access what this does not give: memory that `cudaMalloc` did not make.
    fn allow(&self, ordinal: u32) -> Result<()> {
        let context = self.gpu.context();
        let pieces = pieces(&self.gpu, self.address, self.len, usize::MAX)?;
        let mut others = pieces.iter().filter(|piece| !piece.ipc);
        others.try_for_each(|piece| vmm::allow(context, piece.base, piece.len, ordinal))
    }

    /// Copies bytes out, and waits until that is done. Nothing that other streams do is waited for.
    ///
    /// # Errors
    /// `Region` when the range does not lie inside, `Device` when the driver fails.
    pub fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let source = self.at("read", offset, into.len() as u64)?;
        // SAFETY: inside this region, which is borrowed until the copy is over.
        let done = unsafe { get(self.gpu.stream(), source, into) };
        self.keep_unless_done(&done);
        done
    }

    /// Copies bytes in, and waits until that is done. Nothing that other streams do is waited for.
    ///
    /// # Errors
    /// `Region` when the range does not lie inside, `Device` when the driver fails.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let target = self.at("write", offset, bytes.len() as u64)?;
        // SAFETY: inside this region, which is borrowed until the copy is over.
        let done = unsafe { put(self.gpu.stream(), target, bytes) };
        self.keep_unless_done(&done);
        done
    }

    /// Keeps a peer's memory mapped for good where a copy may still be under way: unmapping does not wait.
    fn keep_unless_done(&self, done: &Result<()>) {
        match &self.backing {
            Backing::Whole(whole) => whole.keep_unless_done(done),
            Backing::Peer(mapping) if done.as_ref().is_err_and(|error| !is_dead(error)) => {
                std::mem::forget(Arc::clone(mapping));
            }
            _ => {}
        }
    }

    /// The address of a checked range.
    fn at(&self, operation: &'static str, offset: u64, len: u64) -> Result<u64> {
        check_inside(operation, self.len, offset, len)?;
        Ok(self.address + offset)
    }
}

/// The first allocations, `most` of them, that lie under a range, in ascending order.
///
/// # Errors
/// `Region` for a range that is not this GPU's from end to end, `Unsupported` for managed memory.
pub(super) fn pieces(gpu: &Gpu, address: u64, len: u64, most: usize) -> Result<Vec<Piece>> {
    let end = check_range("register", address, len)?;
    let mut pieces = Vec::new();
    let mut at = address;
    while at < end && pieces.len() < most {
        let facts = pointer_facts(gpu.context(), at)?;
        match facts.map(|facts| (facts.kind, facts.ordinal)) {
            Some((MemoryKind::Device, Some(ordinal))) if ordinal == gpu.ordinal() => {}
            Some((MemoryKind::Managed, _)) => return Err(managed(at)),
            Some((MemoryKind::Device, Some(ordinal))) => {
                return Err(not_here(gpu, at, &format!("of GPU `{ordinal}`")));
            }
            Some((MemoryKind::Host, _)) => return Err(not_here(gpu, at, "host memory")),
            _ => return Err(not_here(gpu, at, "not the driver's")),
        }
        let (base, size) = allocation_of(gpu.context(), at)?;
        let Some(next) = base.checked_add(size).filter(|&next| base <= at && at < next) else {
            return Err(not_here(gpu, at, "in no allocation that holds it"));
        };
        pieces.push(Piece {
            base,
            len: size,
            ipc: facts.is_some_and(|facts| facts.ipc),
        });
        at = next;
    }
    Ok(pieces)
}

fn not_here(gpu: &Gpu, address: u64, what: &str) -> Error {
    let message = format!(
        "the memory at `{address:#x}` is {what}, GPU `{}` was named",
        gpu.ordinal()
    );
    Error::new(ErrorKind::Region, "register", message)
}
