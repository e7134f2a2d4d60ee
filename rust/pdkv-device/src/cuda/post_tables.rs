//! Where the tables of posts lie: written into a pinned ring, brought from there to one place on the device.
//!
//! The device's side needs no ring: what comes next is brought in the order of the stream, behind the launches that read what was there.
//! The host's side is written at once, so a piece of it stays taken until its post has passed.

use pdkv_core::{Error, ErrorKind, Result};

use super::context::Context;
use super::memory::{DeviceBuffer, PinnedBuffer};
use super::post_layout::Layout;
use super::ring::{Ring, Taken};
use crate::kernels::{Jobs, Lane, PageTables};

/// Bytes of the ring: tables of some sixteen transfers of ten thousand blocks.
const RING_BYTES: usize = 1 << 20;
/// Bytes that a ring grows to at most. No plan that an LLM engine makes comes near.
const MOST_BYTES: usize = 256 << 20;

const ZEROS: [u64; 64] = [0; 64];

/// Values whose bytes may be looked at.
///
/// # Safety
/// There must be no padding.
unsafe trait Plain: Copy {}

// SAFETY: a number.
unsafe impl Plain for u32 {}
// SAFETY: a number.
unsafe impl Plain for u64 {}
// SAFETY: four numbers of eight bytes; `kernels/view.rs` asserts that nothing lies between them.
unsafe impl Plain for Lane {}

#[derive(Debug)]
pub(super) struct PostTables {
    context: Context,
    pinned: PinnedBuffer,
    device: DeviceBuffer,
    ring: Ring,
    /// Bytes of the largest ring that there may be.
    most: usize,
    /// Outgrown, and kept: freeing would wait for the whole device. Together they are smaller than what replaced them.
    outgrown: Vec<(PinnedBuffer, DeviceBuffer)>,
}

impl PostTables {
    /// A ring that grows where it has to.
    pub(super) fn new(context: &Context) -> Result<Self> {
        Self::make(context, RING_BYTES, MOST_BYTES)
    }

    /// A ring of so many bytes for good.
    pub(super) fn fixed(context: &Context, bytes: usize) -> Result<Self> {
        Self::make(context, bytes, bytes)
    }

    fn make(context: &Context, bytes: usize, most: usize) -> Result<Self> {
        Ok(Self {
            context: context.clone(),
            pinned: PinnedBuffer::new(context, bytes)?,
            device: DeviceBuffer::new(context, bytes)?,
            ring: Ring::new(bytes),
            most,
            outgrown: Vec::new(),
        })
    }

    /// Room for the tables of a post. `None` while earlier posts have it; tables larger than the ring get a larger one once it is
    /// empty.
    ///
    /// # Errors
    /// `Capacity` for tables that no ring will hold, `Device` when there is no memory for a larger one.
    pub(super) fn take(&mut self, bytes: usize, idle: bool) -> Result<Option<Taken>> {
        if bytes > self.most {
            let message = format!("tables of `{bytes}` bytes for one copy, `{}` is the most", self.most);
            return Err(Error::new(ErrorKind::Capacity, "copy pages", message)
                .with_hint("transfer fewer blocks or spans at a time"));
        }
        if bytes > self.ring.capacity() {
            if !idle {
                return Ok(None);
            }
            let larger = bytes.next_power_of_two();
            let pinned = PinnedBuffer::new(&self.context, larger)?;
            let device = DeviceBuffer::new(&self.context, larger)?;
            let outgrown = (
                std::mem::replace(&mut self.pinned, pinned),
                std::mem::replace(&mut self.device, device),
            );
            self.outgrown.push(outgrown);
            self.ring = Ring::new(larger);
        }
        Ok(self.ring.take(bytes))
    }

    /// Whether a ring may hold so many bytes.
    pub(super) fn may_hold(&self, bytes: usize) -> bool {
        bytes <= self.most
    }

    /// Gives back what was taken up to the end of a piece.
    pub(super) fn release(&mut self, end: u64) {
        self.ring.release(end);
    }

    /// Writes the tables of a post into the ring at `base`, where room for them was taken.
    ///
    /// # Errors
    /// `Region` when they do not fit.
    pub(super) fn write(&self, jobs: &Jobs, layout: Layout, base: usize) -> Result<()> {
        let mut at = base;
        for job in jobs.list.iter().filter(|_| layout.lanes > 0) {
            self.put(at, &job.lanes)?;
            at += size_of_val(job.lanes.as_slice());
        }
        let PageTables { src, dst } = &jobs.tables;
        for (pages, offset) in [(src, layout.src), (dst, layout.dst)] {
            if let (Some(pages), Some(offset)) = (pages, offset) {
                self.put(base + offset, pages)?;
            }
        }
        // Sums are added to.
        let mut at = base + layout.sums;
        while at < base + layout.total {
            let count = ZEROS.len().min((base + layout.total - at) / size_of::<u64>());
            self.put(at, &ZEROS[..count])?;
            at += count * size_of::<u64>();
        }
        Ok(())
    }

    fn put<T: Plain>(&self, offset: usize, values: &[T]) -> Result<()> {
        // SAFETY: a live slice, looked at as the bytes it consists of; there is no padding.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        self.pinned.write(offset, bytes)
    }

    /// Checksums out of the ring.
    ///
    /// # Errors
    /// `Region` when they do not lie inside.
    pub(super) fn sums(&self, offset: usize, count: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; count * size_of::<u64>()];
        self.pinned.read(offset, &mut bytes)?;
        let word = |chunk: &[u8]| chunk.try_into().map_or(0, u64::from_ne_bytes);
        Ok(bytes.chunks_exact(size_of::<u64>()).map(word).collect())
    }

    /// Where the ring begins, for the device.
    pub(super) fn pinned_address(&self) -> u64 {
        self.pinned.address()
    }

    /// Where the tables of the post that is next in the stream begin.
    pub(super) fn device_address(&self) -> u64 {
        self.device.address()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.outgrown.iter().map(|(_, device)| device.len()).sum::<usize>() + self.device.len()
    }
}
