//! Posting a raw transfer: the way is chosen, the plan proven, and the movers started. Whose spans these are and who may
//! touch them was decided before.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_core::capability::{Require, Wish};
use pdkv_core::id::RegionId;
use pdkv_core::plan::Plan;
use pdkv_core::span::Span;
use pdkv_core::{Error, Result};
use pdkv_device::Memory;
use pdkv_device::cuda::Event;

use crate::link::PeerLink;
use crate::lists::{Memories, Regions};
use crate::pull::INLINE_BYTES;
use crate::raw_fence::RawFence;
use crate::remote::RemoteRegion;
use crate::shared::Shared;
use crate::transfer::{Transfer, TransferCore};
use crate::transport::work::Program;
use crate::transport::{Direction, Need, Work, pick, start};

/// What is to be done with two tables of spans.
pub(crate) struct Order<'a> {
    pub(crate) direction: Direction,
    pub(crate) require: Option<Require>,
    pub(crate) timeout: Duration,
    pub(crate) notify: Option<&'a [u8]>,
    /// What must have passed first.
    pub(crate) after: Option<&'a Arc<Event>>,
    /// When the caller began.
    pub(crate) posted: Instant,
}

/// Starts moving the spans of `here` and `there`, pairwise.
///
/// # Errors
/// `Region`, `Layout` (lengths that disagree), `Unsupported`, `PeerLost`.
pub(crate) fn post(
    shared: &Arc<Shared>,
    peer: &PeerLink,
    order: &Order<'_>,
    here: Table<Memory>,
    there: Table<Arc<RemoteRegion>>,
) -> Result<Transfer> {
    here.still_there()?;
    let need = Need {
        wish: Wish {
            require: order.require,
            require_direct: false,
        },
        bytes: here.spans.iter().map(|span| span.len).fold(0, u64::saturating_add),
        runs: here.spans.len() as u64,
    };
    let (near, far) = (here.sizes(Memory::len), there.sizes(|region| region.len()));
    let (local, remote) = (Memories::from(here.regions), Regions::from(there.regions));
    let (link, path) = pick(&peer.ways, &local, &remote, need)?;
    let plan = match order.direction {
        Direction::Read => Plan::spans(&there.spans, &far, &here.spans, &near),
        Direction::Write => Plan::spans(&here.spans, &near, &there.spans, &far),
    }?;
    let core = Arc::new(TransferCore::new(path));
    core.edit_stats(|stats| stats.plan_us = order.posted.elapsed().as_secs_f64() * 1e6);
    let small = plan.total_bytes() <= INLINE_BYTES;
    let deadline = shared.clock.now().saturating_add(order.timeout);
    let notice = order.notify.map(<[u8]>::to_vec);
    shared.drive(|state, _| {
        // Peers are lost under this lock: what begins afterwards would never be told to stop.
        peer.check_alive()?;
        state.raw.begin(&core, peer.key, deadline, notice);
        Ok::<_, Error>(())
    })?;
    let fence = RawFence::guards(&local, &remote).then(|| Arc::clone(&peer.fence));
    let work = Work::new(
        Arc::clone(&core),
        Arc::clone(shared),
        order.direction,
        Program::Joint(plan),
        order.after.cloned(),
        Arc::new(local),
        Arc::new(remote),
    );
    start(link, Arc::new(work.behind(fence)), small);
    core.edit_stats(|stats| stats.post_us = order.posted.elapsed().as_secs_f64() * 1e6);
    Ok(Transfer::new(core, shared))
}

/// Spans with their regions numbered in order of appearance.
pub(crate) struct Table<R> {
    pub(crate) regions: Vec<R>,
    pub(crate) spans: Vec<Span>,
}

impl<R> Table<R> {
    /// Looks up the region of each span once.
    ///
    /// # Errors
    /// What `find` says of a region.
    pub(crate) fn build<S: Copy>(
        spans: &[S],
        parts: impl Fn(S) -> (RegionId, u64, u64),
        find: impl Fn(RegionId) -> Result<R>,
    ) -> Result<Self> {
        let mut table = Self {
            regions: Vec::new(),
            spans: Vec::with_capacity(spans.len()),
        };
        let mut numbers = BTreeMap::new();
        let mut last = None;
        for &span in spans {
            let (id, offset, len) = parts(span);
            let number = match last {
                Some((same, number)) if same == id => number,
                _ => match numbers.entry(id) {
                    Entry::Occupied(known) => *known.get(),
                    Entry::Vacant(place) => {
                        table.regions.push(find(id)?);
                        *place.insert(table.regions.len() as u32 - 1)
                    }
                },
            };
            last = Some((id, number));
            table.spans.push(Span {
                region: number,
                offset,
                len,
            });
        }
        Ok(table)
    }

    fn sizes(&self, len: impl Fn(&R) -> u64) -> Vec<u64> {
        self.regions.iter().map(len).collect()
    }
}

impl Table<Memory> {
    /// Whether all memory of GPUs among it is what was registered: each region is looked at once, however many spans name it.
    ///
    /// # Errors
    /// `Region` when an allocator has put other memory there, `Device` when the driver fails.
    pub(crate) fn still_there(&self) -> Result<()> {
        let mut regions = self.regions.iter().filter_map(Memory::device);
        regions.try_for_each(|region| region.still_there())
    }
}
