//! The regions of a transfer, ours and the peer's, by the numbers that its plan gives them; and what holds of all of them together. Those of a cache are
//! one list for all its transfers, so that few of these look at each region again.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pdkv_device::Memory;
use pdkv_device::cuda::Gpu;

use crate::remote::RemoteRegion;
use crate::view::{self, bit};

/// Memory of ours.
#[derive(Default)]
pub(crate) struct Memories {
    list: Vec<Memory>,
    /// The one whose memory all of it is: neither a region nor a list changes.
    gpu: Option<Gpu>,
    /// Whether any of it is of a GPU.
    any_device: bool,
}

impl From<Vec<Memory>> for Memories {
    fn from(list: Vec<Memory>) -> Self {
        let first = list.first().and_then(Memory::device).map(|region| region.gpu().clone());
        let all_on = |gpu: &Gpu| {
            let mut regions = list.iter().map(Memory::device);
            regions.all(|region| region.is_some_and(|region| region.gpu().is(gpu)))
        };
        let gpu = first.filter(all_on);
        let any_device = list.iter().any(|memory| memory.device().is_some());
        Self { list, gpu, any_device }
    }
}

impl Memories {
    /// Whether all of it is this GPU's, which therefore reaches it.
    pub(crate) fn are_of(&self, gpu: &Gpu) -> bool {
        self.gpu.as_ref().is_some_and(|of| of.is(gpu))
    }

    /// Whether any of it is memory of a GPU.
    pub(crate) fn any_device(&self) -> bool {
        self.any_device
    }

    pub(crate) fn into_list(self) -> Vec<Memory> {
        self.list
    }
}

impl Deref for Memories {
    type Target = [Memory];

    fn deref(&self) -> &[Memory] {
        &self.list
    }
}

/// Regions of the peer.
#[derive(Default)]
pub(crate) struct Regions {
    list: Vec<Arc<RemoteRegion>>,
    seen: Mutex<Seen>,
    /// Whether none of them is to be mapped again, which stays so.
    mapped: AtomicBool,
    /// Whether any of them is memory of a GPU.
    any_device: bool,
}

/// Which GPUs were found to have views of all regions of a list.
#[derive(Default)]
struct Seen {
    /// Bits by number.
    gpus: u64,
    /// How often views had been spoiled before that: once more, and it is a thing of the past.
    spoils: u64,
}

impl From<Vec<Arc<RemoteRegion>>> for Regions {
    fn from(list: Vec<Arc<RemoteRegion>>) -> Self {
        Self {
            any_device: list.iter().any(|region| region.is_device()),
            list,
            ..Self::default()
        }
    }
}

impl Regions {
    /// Whether there is a view of each for a GPU of ours.
    pub(crate) fn are_ready(&self, gpu: &Gpu) -> bool {
        self.all_show(bit(gpu))
    }

    /// The same for the GPU with this bit.
    fn all_show(&self, bit: u64) -> bool {
        // First: what is spoiled while the list is walked counts as later.
        let spoils = view::spoils();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.spoils != spoils {
            *seen = Seen { gpus: 0, spoils };
        }
        if seen.gpus & bit != 0 {
            return true;
        }
        let all = self.list.iter().all(|region| region.views.shows(bit));
        if all {
            seen.gpus |= bit;
        }
        all
    }

    /// Whether a GPU of ours sees all of them, as far as that is known; the reason when not.
    pub(crate) fn may_view(&self, gpu: &Gpu) -> Result<(), String> {
        if self.are_ready(gpu) {
            return Ok(());
        }
        self.list.iter().try_for_each(|region| region.may_view(gpu))
    }

    /// Whether what this process sees of them is settled for good: no transfer has to have any tried again.
    pub(crate) fn are_mapped(&self) -> bool {
        if self.mapped.load(Ordering::Acquire) {
            return true;
        }
        let mapped = self.list.iter().all(|region| region.mapping.is_final());
        self.mapped.fetch_or(mapped, Ordering::Release);
        mapped
    }

    /// Whether any of them is memory of a GPU.
    pub(crate) fn any_device(&self) -> bool {
        self.any_device
    }

    pub(crate) fn into_list(self) -> Vec<Arc<RemoteRegion>> {
        self.list
    }
}

impl Deref for Regions {
    type Target = [Arc<RemoteRegion>];

    fn deref(&self) -> &[Arc<RemoteRegion>] {
        &self.list
    }
}

#[cfg(test)]
mod tests {
    use pdkv_core::id::RegionId;

    use super::*;
    use crate::view::Views;

    /// Regions of which the GPUs with these bits have views.
    fn regions(bits: &[u64]) -> Regions {
        let region = |(id, bits): (u64, &u64)| {
            let mut region = RemoteRegion::new(RegionId(id), 4096, 0, true, None);
            region.views = Views::ready(*bits);
            Arc::new(region)
        };
        Regions::from((1..).zip(bits).map(region).collect::<Vec<_>>())
    }

    #[test]
    fn what_all_regions_show_is_forgotten_when_one_of_them_is_spoiled() {
        let (list, other) = (regions(&[0b11, 0b01]), regions(&[0b01]));
        for _ in 0..2 {
            assert!(list.all_show(0b01) && other.all_show(0b01));
            assert!(!list.all_show(0b10), "one of them does not");
        }
        list[1].views.spoil("there is other memory");
        for _ in 0..2 {
            assert!(!list.all_show(0b01) && other.all_show(0b01));
        }
    }

    #[test]
    fn regions_are_mapped_once_nothing_is_to_be_tried_again() {
        let open = RemoteRegion::new(RegionId(1), 4096, 0, true, Some((0, 4096)));
        let list = Regions::from(vec![Arc::new(open)]);
        assert!(!list.are_mapped() && list[0].mapping.claim());
        let error = pdkv_core::Error::new(pdkv_core::ErrorKind::Unsupported, "test", "as the test wants");
        list[0].mapping.settle(Err(error), std::time::Instant::now());
        assert!(list.are_mapped() && list.are_mapped());
    }
}
