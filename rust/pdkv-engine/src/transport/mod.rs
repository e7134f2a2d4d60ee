//! The movers of bytes, behind one trait with capabilities as data.
//!
//! A [`Link`] is one way to one peer. One-sided links (`inproc`, `shm`, `cma`) copy in this
//! process, on the copy threads or, for little work, right where they are called. The two-sided
//! link (`tcp`) lets both ends gather and scatter by their own tables. A lane of `ucx` is one or the
//! other, as both ends agree. Which link a transfer takes is decided in [`pick`], by the pure chooser
//! of `pdkv-core`, which also keeps the reasons.

pub(crate) mod onesided;
pub(crate) mod request;
pub(crate) mod serving;
pub(crate) mod tcp;
pub(crate) mod ucx;
pub(crate) mod work;

use std::sync::Arc;

use pdkv_core::capability::{Capability, Offer, Require, Wish, choose};
use pdkv_core::{Error, ErrorKind, Result};

use crate::config::TransportKind;
use crate::remote::RemoteRegion;
use crate::transfer::Path;
pub(crate) use work::{Direction, Work};

/// One way to one peer.
pub(crate) trait Link: Send + Sync {
    /// What it can do, its transport included.
    fn capability(&self) -> Capability;

    /// What it rides on, for `path.detail`.
    fn detail(&self) -> String;

    /// Whether it reaches all of these regions; the reason when not.
    fn reaches(&self, regions: &[Arc<RemoteRegion>]) -> Result<(), String>;

    /// Starts moving. The work reports its own end exactly once, whatever happens.
    fn start(self: Arc<Self>, work: Arc<Work>);

    /// Whether [`run_inline`](Self::run_inline) would not wait for anybody.
    fn ready_inline(&self, work: &Work) -> bool;

    /// Moves everything in the calling thread, for work so small that handing it over costs more.
    fn run_inline(self: Arc<Self>, work: &Arc<Work>);

    /// Ends whatever blocks on the peer for this link: called when the peer is lost.
    fn shut_down(&self);
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

/// Picks the cheapest way that reaches the regions and meets the wish.
///
/// # Errors
/// `Unsupported` naming every transport and its reason.
pub(crate) fn pick(ways: &[Way], regions: &[Arc<RemoteRegion>], need: Need) -> Result<(Arc<dyn Link>, Arc<Path>)> {
    let offer = |way: &Way| Offer {
        transport: way.kind,
        usable: match &way.link {
            Ok(link) => link.reaches(regions).and_then(|()| match link.capability() {
                // What it rides on instead is the reason.
                able if need.wish.require == Some(Require::Rdma) && !able.rdma => {
                    Err(format!("not RDMA: {}", link.detail()))
                }
                able => Ok(able),
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
    let choice = choose(&offers, need.wish, need.bytes, need.runs)?;
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
