//! What the owner of memory lets a request touch: each is checked against what this side granted or
//! registered, and the pages are found by our own tables. How the bytes travel is the transports' affair.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pdkv_core::id::{PeerKey, TransferId};
use pdkv_core::plan::{PageWalk, WireOrder};
use pdkv_core::reference::ExportKind;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;

use super::request::{Request, Target, Verb, WireSpan};
use crate::lists::Memories;
use crate::post::Table;
use crate::registry::LocalCache;
use crate::remains::Remains;
use crate::shared::Shared;

/// A granted claim as it is served.
pub(crate) struct Serving {
    pub(crate) kind: ExportKind,
    pub(crate) walk: PageWalk,
    pub(crate) regions: Arc<Memories>,
    cache: Arc<LocalCache>,
    /// The claim is over: stop touching memory.
    pub(crate) ended: AtomicBool,
}

impl Serving {
    /// A granted claim that is alive.
    fn of(shared: &Shared, peer: PeerKey, transfer: TransferId) -> Result<Self> {
        let view = {
            let node = &shared.lock().node;
            let view = node.claim_view(peer, transfer).filter(|view| !view.revoked);
            view.ok_or_else(|| node.why_ended(peer, transfer))?
        };
        let cache = shared.registry.cache(view.cache)?;
        let order = view.order.unwrap_or_else(|| WireOrder::natural(&cache.layout));
        let walk = match view.kind {
            ExportKind::Export => PageWalk::new(&cache.layout, &view.blocks, &view.selection, order),
            ExportKind::Offer => PageWalk::scatter(&cache.layout, &view.blocks, &view.selection, order),
        }?;
        Ok(Self {
            kind: view.kind,
            walk,
            regions: Arc::clone(&cache.memory),
            cache,
            ended: AtomicBool::new(false),
        })
    }
}

/// The claims that are being served, so that each is looked up and walked out only once.
#[derive(Default)]
pub(crate) struct Servings {
    live: Mutex<HashMap<(PeerKey, TransferId), Arc<Serving>>>,
}

impl Servings {
    fn find(&self, shared: &Shared, peer: PeerKey, transfer: TransferId) -> Result<Arc<Serving>> {
        let known = self.live().get(&(peer, transfer)).map(Arc::clone);
        known.map_or_else(
            || self.enter(shared, peer, transfer, Serving::of(shared, peer, transfer)?),
            Ok,
        )
    }

    /// Keeps what was worked out, for as long as the claim lives. Its end is told under the lock of the state: under that lock it is entered, too, or
    /// nobody would take out what came a moment late.
    fn enter(&self, shared: &Shared, peer: PeerKey, transfer: TransferId, serving: Serving) -> Result<Arc<Serving>> {
        let state = shared.lock();
        if state.node.claim_view(peer, transfer).is_none_or(|view| view.revoked) {
            return Err(state.node.why_ended(peer, transfer));
        }
        Ok(Arc::clone(
            self.live().entry((peer, transfer)).or_insert_with(|| Arc::new(serving)),
        ))
    }

    fn live(&self) -> MutexGuard<'_, HashMap<(PeerKey, TransferId), Arc<Serving>>> {
        self.live.lock().expect("no holder panics")
    }

    /// The claim ended: whoever serves it stops touching memory at the next look.
    pub(crate) fn end(&self, peer: PeerKey, transfer: TransferId, remains: &mut Remains) {
        let Some(serving) = self.live().remove(&(peer, transfer)) else {
            return;
        };
        serving.ended.store(true, Ordering::Release);
        if let Some(serving) = Arc::into_inner(serving) {
            remains.add_memories(serving.regions);
            remains.add(serving.cache);
        }
    }
}

/// One request for units of a claim that was found good. As long as it lives, the claim counts it as
/// touching memory.
pub(crate) struct Permit {
    shared: Arc<Shared>,
    peer: PeerKey,
    transfer: TransferId,
    pub(crate) serving: Arc<Serving>,
    pub(crate) units: Range<u64>,
    report: Result<()>,
}

impl Permit {
    /// Judges a request for units of a claim.
    ///
    /// # Errors
    /// What the peer is to be told.
    pub(crate) fn new(shared: &Arc<Shared>, peer: PeerKey, request: &Request) -> Result<Self> {
        let Target::Claim {
            transfer,
            first_unit: first,
            units,
        } = request.target
        else {
            return Err(refuse(ErrorKind::Internal, "spans are of no claim".to_owned()));
        };
        let serving = shared.servings.find(shared, peer, transfer)?;
        let allowed = match request.verb {
            Verb::Get => ExportKind::Export,
            Verb::Put => ExportKind::Offer,
        };
        if serving.kind != allowed {
            let text = format!("transfer `{transfer}` may not be `{:?}`", request.verb);
            return Err(refuse(ErrorKind::Region, text));
        }
        let count = serving.walk.unit_count();
        let range = first
            .checked_add(units)
            .filter(|&end| end <= count)
            .map(|end| first..end);
        let Some(range) = range else {
            let text = format!("units `{first}` + `{units}` exceed the `{count}` of the claim");
            return Err(refuse(ErrorKind::Layout, text));
        };
        let bytes = serving.walk.unit_bytes() * units;
        if bytes != request.bytes {
            let text = format!(
                "units `{first}` + `{units}` are `{bytes}` bytes here, `{}` there",
                request.bytes
            );
            return Err(refuse(ErrorKind::Layout, text));
        }
        serving.cache.still_there()?;
        shared.drive(|state, _| {
            let view = state.node.serve_started(peer, transfer);
            view.ok_or_else(|| state.node.why_ended(peer, transfer))
        })?;
        Ok(Self {
            shared: Arc::clone(shared),
            peer,
            transfer,
            serving,
            units: range,
            report: Ok(()),
        })
    }

    /// The memory holds less than was asked for: the claim is taken back when this is dropped.
    pub(crate) fn fail(&mut self, error: &Error) {
        self.report = Err(error.clone());
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let report = std::mem::replace(&mut self.report, Ok(()));
        // What was touched under the allocator's hands is nobody's block.
        let report = report.and_then(|()| self.serving.cache.still_there());
        let (peer, transfer) = (self.peer, self.transfer);
        self.shared
            .drive(|state, now| state.node.serve_ended(now, peer, transfer, report));
    }
}

/// Where in which of our regions, and how long.
pub(crate) type Place = (Memory, u64, u64);

/// Judges the spans of a request: regions, offsets, lengths.
///
/// # Errors
/// What the peer is to be told.
pub(crate) fn raw_spans(shared: &Shared, peer: PeerKey, raw: &[u8], announced: u64) -> Result<Vec<Place>> {
    let spans: Vec<_> = raw.chunks_exact(WireSpan::SIZE).map(WireSpan::decode).collect();
    let parts = |span: WireSpan| (span.region, span.offset, span.len);
    let table = Table::build(&spans, parts, |id| shared.registry.raw_region(peer, id))?;
    table.still_there()?;
    let mut found = Vec::with_capacity(spans.len());
    let mut bytes = 0_u64;
    for (named, span) in spans.iter().zip(&table.spans) {
        let region = &table.regions[span.region as usize];
        let fits = span.offset.checked_add(span.len).is_some_and(|end| end <= region.len());
        if !fits {
            let text = format!(
                "span `{}` + `{}` is outside region `{}` of `{}` bytes",
                span.offset,
                span.len,
                named.region,
                region.len()
            );
            return Err(refuse(ErrorKind::Region, text));
        }
        bytes = bytes.saturating_add(span.len);
        found.push((region.clone(), span.offset, span.len));
    }
    if bytes != announced {
        let text = format!("spans of `{bytes}` bytes, `{announced}` announced");
        return Err(refuse(ErrorKind::Layout, text));
    }
    Ok(found)
}

fn refuse(kind: ErrorKind, message: String) -> Error {
    Error::new(kind, "serve", message)
}

#[cfg(test)]
#[path = "serving_tests.rs"]
mod tests;
