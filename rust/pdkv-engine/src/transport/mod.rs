//! The movers of bytes, behind one trait with capabilities as data.
//!
//! A [`Link`] is one way to one peer. One-sided links (`inproc`, `shm`, `cma`) copy in this
//! process, on the copy threads or, for little work, right where they are called; so does `cuda`, on a GPU. The two-sided
//! link (`tcp`) lets both ends gather and scatter by their own tables. A lane of `ucx` is one or the
//! other, as both ends agree. Which link a transfer takes is decided in [`pick`], by the pure chooser
//! of `pdkv-core`, which also keeps the reasons.

pub(crate) mod gpu;
pub(crate) mod onesided;
pub(crate) mod request;
pub(crate) mod serving;
pub(crate) mod tcp;
pub(crate) mod ucx;
pub(crate) mod work;

use std::sync::Arc;

use pdkv_core::capability::{Capability, Choice, Offer, Require, Wish, choose};
use pdkv_core::gpu_memory::GpuMemory;
use pdkv_core::{Error, ErrorKind, Result};

use crate::config::TransportKind;
use crate::lists::{Memories, Regions};
use crate::transfer::Path;
pub(crate) use work::{Direction, Work};

/// One way to one peer.
pub(crate) trait Link: Send + Sync {
    /// What it can do, its transport included.
    fn capability(&self) -> Capability;

    /// What it can do between these memories, where that is less than at best.
    fn capability_between(&self, _local: &Memories, _remote: &Regions) -> Capability {
        self.capability()
    }

    /// What it rides on, for `path.detail`.
    fn detail(&self) -> String;

    /// Whether it moves bytes between all of our memory and all of these regions; the reason when not. A link whose
    /// capability refuses memory of GPUs need not look at that: [`able`] does.
    fn reaches(&self, local: &Memories, remote: &Regions) -> Result<(), String>;

    /// Why it can't be told yet whether it does, where that takes a while to find out: then ways that are known to are taken, where there are any.
    fn doubt(&self, _local: &Memories, _remote: &Regions) -> Option<String> {
        None
    }

    /// Has that found out for those who come later. Waits for nobody.
    fn resolve(&self) {}

    /// Starts moving. The work reports its own end exactly once, whatever happens.
    fn start(self: Arc<Self>, work: Arc<Work>);

    /// Whether [`run_inline`](Self::run_inline) would not wait for anybody.
    fn ready_inline(&self, work: &Work) -> bool;

    /// Moves everything in the calling thread, for work so small that handing it over costs more.
    fn run_inline(self: Arc<Self>, work: &Arc<Work>);

    /// Whether it waits for a transfer's event by itself, where the bytes are moved. If not, the transfer starts after it.
    fn orders_events(&self) -> bool {
        false
    }

    /// Ends whatever blocks on the peer for this link: called when the peer is lost.
    fn shut_down(&self);
}

/// Starts the work, once what it comes after has passed; runs it here when that is cheaper than handing it over.
pub(crate) fn start(link: Arc<dyn Link>, work: Arc<Work>, small: bool) {
    if work.after.is_some() && !link.orders_events() {
        let (shared, mine) = (Arc::clone(&work.shared), Arc::clone(&work));
        let wait = move || match mine.await_event() {
            Ok(()) => link.start(mine),
            Err(error) => mine.refuse(error),
        };
        if let Err(error) = shared.movers.task(wait) {
            work.refuse(error);
        }
    } else if small && link.ready_inline(&work) {
        link.run_inline(&work);
    } else {
        link.start(work);
    }
}

/// What a link can do between these memories.
///
/// # Errors
/// Why it doesn't move bytes between them.
fn able(link: &dyn Link, local: &Memories, remote: &Regions) -> Result<Capability, String> {
    link.reaches(local, remote)?;
    let able = link.capability_between(local, remote);
    if able.gpu == GpuMemory::Refused {
        host_only(local, remote)?;
    }
    Ok(able)
}

/// Refuses all memory but the host's.
///
/// # Errors
/// The reason, which names the memory.
fn host_only(local: &Memories, remote: &Regions) -> Result<(), String> {
    if !local.any_device() && !remote.any_device() {
        return Ok(());
    }
    for memory in local.iter() {
        memory.host().map_err(|error| error.message().to_owned())?;
    }
    match remote.iter().find(|region| region.is_device()) {
        Some(region) => Err(format!("region `{}` of the peer is device memory", region.id)),
        None => Ok(()),
    }
}

/// A link, or why there is none.
pub(crate) struct Way {
    pub(crate) kind: TransportKind,
    pub(crate) link: Result<Arc<dyn Link>, String>,
}

/// What a caller insists on: how to reach which memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) wish: Wish,
    pub(crate) bytes: u64,
    pub(crate) runs: u64,
}

/// Picks the cheapest way that moves between our memory and the peer's regions and meets the wish.
///
/// # Errors
/// `Unsupported` naming every transport and its reason.
pub(crate) fn pick(ways: &[Way], local: &Memories, remote: &Regions, need: Need) -> Result<(Arc<dyn Link>, Arc<Path>)> {
    let offer = |way: &Way| Offer {
        transport: way.kind,
        usable: match &way.link {
            Ok(link) => able(&**link, local, remote).and_then(|able| {
                // What it rides on instead is the reason.
                if need.wish.require == Some(Require::Rdma) && !able.rdma {
                    return Err(format!("not RDMA: {}", link.detail()));
                }
                Ok(able)
            }),
            Err(reason) => Err(reason.clone()),
        },
    };
    let mut offers: Vec<Offer> = ways.iter().map(offer).collect();
    let asked = match need.wish.require {
        Some(Require::Transport(kind)) => Some(kind),
        // The only one that can be.
        Some(Require::Rdma) => Some(TransportKind::Ucx),
        None => None,
    };
    if let Some(transport) = asked.filter(|&kind| !ways.iter().any(|way| way.kind == kind)) {
        offers.push(Offer {
            transport,
            usable: Err("not among this engine's `transports`".into()),
        });
    }
    let choice = match surely(ways, &offers, local, remote, need) {
        Some(choice) => choice,
        None => choose(&offers, need.wish, need.bytes, need.runs)?,
    };
    let kind = choice.capability.transport;
    let link = ways
        .iter()
        .find(|way| way.kind == kind)
        .and_then(|way| way.link.as_ref().ok());
    let link = link.ok_or_else(|| Error::new(ErrorKind::Internal, "choose transport", "the chosen way has no link"))?;
    Ok((
        Arc::clone(link),
        Arc::new(Path {
            transport: kind,
            rdma: choice.capability.rdma,
            detail: link.detail(),
            reasons: choice.reasons,
        }),
    ))
}

/// The choice among the ways that are known to reach, where others are in doubt, and that is found out meanwhile. `None` where there is no doubt, or no
/// other way.
fn surely(ways: &[Way], offers: &[Offer], local: &Memories, remote: &Regions, need: Need) -> Option<Choice> {
    // What insists on one way has no other.
    if need.wish.require.is_some() {
        return None;
    }
    let mut doubts = Vec::new();
    for (at, way) in ways.iter().enumerate() {
        if let (Ok(_), Ok(link)) = (&offers[at].usable, &way.link)
            && let Some(reason) = link.doubt(local, remote)
        {
            doubts.push((at, link, reason));
        }
    }
    if doubts.is_empty() {
        return None;
    }
    let mut known = offers.to_vec();
    for (at, _, reason) in &doubts {
        known[*at].usable = Err(reason.clone());
    }
    let choice = choose(&known, need.wish, need.bytes, need.runs).ok()?;
    for (_, link, _) in doubts {
        link.resolve();
    }
    Some(choice)
}
