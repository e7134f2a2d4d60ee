//! The owner's end of the data streams: one thread per stream, asleep while nothing is asked.
//!
//! Every request is checked against what this side granted or registered; the pages are found by
//! our own tables. Bytes for a claim that ended meanwhile are read off the stream and dropped.

use std::collections::HashMap;
use std::ops::{ControlFlow, Range};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use pdkv_core::id::{PeerKey, TransferId};
use pdkv_core::plan::{PageWalk, WireOrder};
use pdkv_core::reference::ExportKind;
use pdkv_core::span::Span;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::{HostRegion, IoBatch};

use super::codec::{MAX_MESSAGE, Request, Response, Target, Verb, WireSpan};
use super::socket::Socket;
use crate::shared::Shared;

/// A granted claim as the data streams serve it.
pub(crate) struct Serving {
    pub(crate) kind: ExportKind,
    pub(crate) walk: PageWalk,
    pub(crate) regions: Vec<Arc<HostRegion>>,
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
            regions: cache.memory.clone(),
            ended: AtomicBool::new(false),
        })
    }
}

/// The claims that data streams are serving, so that each is looked up and walked out only once.
#[derive(Default)]
pub(crate) struct Servings {
    live: Mutex<HashMap<(PeerKey, TransferId), Arc<Serving>>>,
}

impl Servings {
    fn find(&self, shared: &Shared, peer: PeerKey, transfer: TransferId) -> Result<Arc<Serving>> {
        if let Some(serving) = self.live.lock().expect("no holder panics").get(&(peer, transfer)) {
            return Ok(Arc::clone(serving));
        }
        let serving = Arc::new(Serving::of(shared, peer, transfer)?);
        let mut live = self.live.lock().expect("no holder panics");
        Ok(Arc::clone(live.entry((peer, transfer)).or_insert(serving)))
    }

    /// The claim ended: its streams stop touching memory at the next batch.
    pub(crate) fn end(&self, peer: PeerKey, transfer: TransferId) {
        if let Some(serving) = self.live.lock().expect("no holder panics").remove(&(peer, transfer)) {
            serving.ended.store(true, Ordering::Release);
        }
    }
}

/// Serves a data stream of the peer on a thread of its own.
///
/// # Errors
/// `Capacity` when the system gives no thread.
pub(crate) fn serve_stream(shared: &Arc<Shared>, peer: PeerKey, socket: Socket) -> Result<()> {
    let socket = shared.streams.enter(peer, socket)?;
    // The peer may have been lost since its token was looked up; then nobody else would shut this.
    if !shared.lock().peers.contains_key(&peer) {
        shared.streams.shut_down(peer);
    }
    let shared = Arc::clone(shared);
    crate::mover::spawn("pdkv-serve", move || serve(&shared, peer, &socket))
}

/// Serves one stream until it ends.
fn serve(shared: &Arc<Shared>, peer: PeerKey, socket: &Socket) {
    let mut server = Server {
        shared,
        peer,
        socket,
        spare: IoBatch::new(),
        never: AtomicBool::new(false),
    };
    loop {
        socket.wait_idle();
        match server.one() {
            Ok(()) => {}
            Err(error) => {
                tracing::debug!(peer = %peer, %error, "data stream ended");
                break;
            }
        }
    }
    socket.shut_down();
}

struct Server<'a> {
    shared: &'a Arc<Shared>,
    peer: PeerKey,
    socket: &'a Socket,
    /// The span list's memory, kept from request to request.
    spare: IoBatch<'static>,
    never: AtomicBool,
}

impl Server<'_> {
    /// Serves one request. An error ends the stream; the end of the peer's side is one.
    fn one(&mut self) -> Result<()> {
        let mut raw = [0; Request::SIZE];
        self.socket.read_exact(&mut raw, &self.never)?;
        let request = Request::decode(&raw)?;
        let outcome = match request.target {
            Target::Claim {
                transfer,
                first_unit,
                units,
            } => self.claim(&request, transfer, first_unit, units),
            Target::Spans { count } => self.spans(&request, count),
        };
        match outcome {
            Ok(()) => Ok(()),
            Err(Answer::Refuse(error)) => self.refuse(&request, &error),
            Err(Answer::Broken(error)) => Err(error),
        }
    }

    fn claim(&mut self, request: &Request, transfer: TransferId, first: u64, units: u64) -> Result<(), Answer> {
        let serving = self
            .shared
            .servings
            .find(self.shared, self.peer, transfer)
            .map_err(Answer::Refuse)?;
        let allowed = match request.verb {
            Verb::Get => ExportKind::Export,
            Verb::Put => ExportKind::Offer,
        };
        if serving.kind != allowed {
            return Err(Answer::refuse(
                ErrorKind::Region,
                format!("transfer `{transfer}` may not be `{:?}`", request.verb),
            ));
        }
        let range = first
            .checked_add(units)
            .filter(|&end| end <= serving.walk.unit_count())
            .map(|end| first..end);
        let Some(range) = range else {
            return Err(Answer::refuse(
                ErrorKind::Layout,
                format!(
                    "units `{first}` + `{units}` exceed the `{}` of the claim",
                    serving.walk.unit_count()
                ),
            ));
        };
        let bytes = serving.walk.unit_bytes() * units;
        if bytes != request.bytes {
            return Err(Answer::refuse(
                ErrorKind::Layout,
                format!(
                    "units `{first}` + `{units}` are `{bytes}` bytes here, `{}` there",
                    request.bytes
                ),
            ));
        }
        let (peer, shared) = (self.peer, self.shared);
        let started = shared.drive(|state, _| {
            let view = state.node.serve_started(peer, transfer);
            view.ok_or_else(|| state.node.why_ended(peer, transfer))
        });
        if let Err(error) = started {
            // It may have ended just before `find` entered it; then nobody else would take it out.
            shared.servings.end(peer, transfer);
            return Err(Answer::Refuse(error));
        }
        let outcome = self.move_units(request.verb, &serving, range, bytes);
        // A reader that goes away says so itself; a writer that stops halfway makes the offer useless.
        let report = match &outcome {
            Err(Answer::Refuse(error) | Answer::Broken(error)) if request.verb == Verb::Put => Err(error.clone()),
            _ => Ok(()),
        };
        shared.drive(|state, now| state.node.serve_ended(now, peer, transfer, report));
        if request.verb == Verb::Put && outcome.is_ok() {
            self.answer(bytes).map_err(Answer::Broken)?;
        }
        outcome
    }

    fn move_units(&mut self, verb: Verb, serving: &Serving, units: Range<u64>, bytes: u64) -> Result<(), Answer> {
        match verb {
            Verb::Get => {
                self.answer(bytes).map_err(Answer::Broken)?;
                self.each_batch(serving, units, |batch, socket, never| {
                    batch.send_all(socket, &[], never).map(drop)
                })
            }
            // An ended claim stops this within one look at the flag; the stream then ends too, so
            // whatever is still on its way has nowhere to go.
            Verb::Put => self.each_batch(serving, units, |batch, socket, _| {
                batch.recv_all(socket, &serving.ended).map(drop)
            }),
        }
    }

    fn spans(&mut self, request: &Request, count: u32) -> Result<(), Answer> {
        let mut raw = vec![0; count as usize * WireSpan::SIZE];
        self.socket.read_exact(&mut raw, &self.never).map_err(Answer::Broken)?;
        let mut found = Vec::with_capacity(count as usize);
        let mut bytes = 0_u64;
        for span in raw.chunks_exact(WireSpan::SIZE).map(WireSpan::decode) {
            let region = self.shared.registry.raw_region(span.region).map_err(Answer::Refuse)?;
            let fits = span.offset.checked_add(span.len).is_some_and(|end| end <= region.len());
            if !fits {
                return Err(Answer::refuse(
                    ErrorKind::Region,
                    format!(
                        "span `{}` + `{}` is outside region `{}` of `{}` bytes",
                        span.offset,
                        span.len,
                        span.region,
                        region.len()
                    ),
                ));
            }
            bytes = bytes.saturating_add(span.len);
            found.push((region, span.offset, span.len));
        }
        if bytes != request.bytes {
            return Err(Answer::refuse(
                ErrorKind::Layout,
                format!("spans of `{bytes}` bytes, `{}` announced", request.bytes),
            ));
        }
        if request.verb == Verb::Get {
            self.answer(bytes).map_err(Answer::Broken)?;
        }
        let mut batch = std::mem::take(&mut self.spare).recycle();
        for (region, offset, len) in &found {
            // One request names at most as many spans as one batch holds, so this never overflows.
            batch.push(region, *offset, *len).map_err(Answer::Broken)?;
        }
        let moved = match request.verb {
            Verb::Get => batch.send_all(self.socket.fd(), &[], &self.never).map(drop),
            Verb::Put => batch
                .recv_all(self.socket.fd(), &self.never)
                .and_then(|_| self.answer(bytes)),
        };
        self.spare = batch.recycle();
        moved.map_err(Answer::Broken)
    }

    /// Walks the units and hands over a batch of spans whenever it is full, and the last one.
    fn each_batch(
        &mut self,
        serving: &Serving,
        units: Range<u64>,
        io: impl Fn(&mut IoBatch<'_>, BorrowedFd<'_>, &AtomicBool) -> Result<()>,
    ) -> Result<(), Answer> {
        let mut batch = std::mem::take(&mut self.spare).recycle();
        let mut failure = None;
        let _ = serving.walk.walk(units, |span: Span| {
            let outcome = match batch.push(&serving.regions[span.region as usize], span.offset, span.len) {
                Ok(false) => Ok(()),
                Ok(true) => io(&mut batch, self.socket.fd(), &self.never),
                Err(error) => Err(error),
            };
            outcome.map_or_else(
                |error| {
                    failure = Some(error);
                    ControlFlow::Break(())
                },
                ControlFlow::Continue,
            )
        });
        if failure.is_none() && !batch.is_empty() {
            failure = io(&mut batch, self.socket.fd(), &self.never).err();
        }
        self.spare = batch.recycle();
        failure.map_or(Ok(()), |error| Err(Answer::Broken(error)))
    }

    fn answer(&self, bytes: u64) -> Result<()> {
        self.socket.write_all(
            &Response {
                code: 0,
                message_len: 0,
                bytes,
            }
            .encode(),
            &self.never,
        )
    }

    /// Says no. The payload of a refused `Put` is already on its way and is dropped here.
    fn refuse(&self, request: &Request, error: &Error) -> Result<()> {
        if request.verb == Verb::Put {
            let mut scrap = vec![0; 64 << 10];
            let mut left = request.bytes;
            while left > 0 {
                let take = left.min(scrap.len() as u64) as usize;
                self.socket.read_exact(&mut scrap[..take], &self.never)?;
                left -= take as u64;
            }
        }
        let mut text = error.message().to_owned();
        while text.len() > MAX_MESSAGE {
            text.pop();
        }
        let response = Response {
            code: error.kind() as u16,
            message_len: text.len() as u16,
            bytes: 0,
        };
        self.socket.write_all(&response.encode(), &self.never)?;
        self.socket.write_all(text.as_bytes(), &self.never)
    }
}

/// Why a request isn't answered with bytes.
enum Answer {
    /// The peer is told; the stream goes on.
    Refuse(Error),
    /// The stream is out of step and ends.
    Broken(Error),
}

impl Answer {
    fn refuse(kind: ErrorKind, message: String) -> Self {
        Self::Refuse(Error::new(kind, "serve", message))
    }
}
