//! The owner's end of the data streams: one thread per stream, asleep while nothing is asked.
//!
//! Every request is checked in [`serving`](crate::transport::serving). Bytes for a claim that ended meanwhile are read off the stream and dropped.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pdkv_core::id::PeerKey;
use pdkv_core::span::Span;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::IoBatch;

use super::codec::{MAX_MESSAGE, Response};
use super::pages::{Flow, Pages, gpus_of};
use super::socket::Socket;
use crate::dial::{STREAM_FULL, STREAM_READY};
use crate::shared::Shared;
use crate::transport::request::{Request, Target, Verb, WireSpan};
use crate::transport::serving::{Permit, Place, Serving, raw_spans};

/// What the initiator of a data stream hears before it asks for anything.
#[derive(Clone, Copy)]
pub(crate) struct Greeting {
    /// It waits to hear that the stream is taken on.
    pub(crate) ready: bool,
    /// It understands that there are too many; else the end of the stream says so.
    pub(crate) full: bool,
}

/// Takes on a data stream of the peer, to serve it on a thread of its own, and says whether.
///
/// # Errors
/// `Capacity` when the peer has as many as it may have, or the system gives no thread; `PeerLost` when it is gone already.
pub(crate) fn serve_stream(shared: &Arc<Shared>, peer: PeerKey, socket: Socket, greeting: Greeting) -> Result<()> {
    let socket = Arc::new(socket);
    let taken = take_on(shared, peer, &socket);
    let word = match &taken {
        Ok(()) => greeting.ready.then_some(STREAM_READY),
        Err(error) => (greeting.full && error.kind() == ErrorKind::Capacity).then_some(STREAM_FULL),
    };
    // One byte on a fresh stream waits for nobody.
    let told = word.map_or(Ok(()), |word| socket.write_all(&[word], &AtomicBool::new(false)));
    if told.is_err() {
        socket.shut_down();
    }
    taken.and(told)
}

fn take_on(shared: &Arc<Shared>, peer: PeerKey, socket: &Arc<Socket>) -> Result<()> {
    shared.streams.enter(peer, socket)?;
    // The peer may have been lost since its token was looked up; then nobody else would shut this.
    if !shared.lock().peers.contains_key(&peer) {
        shared.streams.shut_down(peer);
    }
    let (shared, socket) = (Arc::clone(shared), Arc::clone(socket));
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
            Target::Claim { .. } => self.claim(&request),
            Target::Spans { count } => self.spans(&request, count),
        };
        match outcome {
            Ok(()) => Ok(()),
            Err(Answer::Refuse(error)) => self.refuse(&request, &error),
            Err(Answer::Broken(error)) => Err(error),
        }
    }

    fn claim(&mut self, request: &Request) -> Result<(), Answer> {
        let mut permit = Permit::new(self.shared, self.peer, request).map_err(Answer::Refuse)?;
        let outcome = self.move_units(request.verb, &permit.serving, permit.units.clone(), request.bytes);
        match (request.verb, &outcome) {
            // A writer that stops halfway makes the offer useless.
            (Verb::Put, Err(Answer::Refuse(error) | Answer::Broken(error))) => permit.fail(error),
            // A reader that goes away says so itself; what went wrong here it has to be told before its stream ends.
            (Verb::Get, Err(Answer::Broken(error))) if error.kind() != ErrorKind::PeerLost => permit.fail(error),
            _ => {}
        }
        drop(permit);
        if request.verb == Verb::Put && outcome.is_ok() {
            self.answer(request.bytes).map_err(Answer::Broken)?;
        }
        outcome
    }

    fn move_units(&mut self, verb: Verb, serving: &Serving, units: Range<u64>, bytes: u64) -> Result<(), Answer> {
        // An ended claim stops a `Put` within one look at the flag; the stream then ends too, so whatever is still on its way has
        // nowhere to go.
        let mut pages = Pages::new(std::mem::take(&mut self.spare).recycle());
        let stop = match verb {
            Verb::Get => {
                let gpus = gpus_of(serving.regions.iter());
                let flow = self.flow(verb, &self.never);
                pages.prepare(flow, &gpus, &serving.ended).map_err(Answer::Refuse)?;
                self.answer(bytes).map_err(Answer::Broken)?;
                &AtomicBool::new(false)
            }
            Verb::Put => &serving.ended,
        };
        let mut moved = Ok(());
        let _ = serving.walk.walk(units, |span: Span| {
            let memory = &serving.regions[span.region as usize];
            match pages.push(self.flow(verb, stop), memory, span.offset, span.len) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    moved = Err(error);
                    ControlFlow::Break(())
                }
            }
        });
        let moved = moved.and_then(|()| pages.finish(self.flow(verb, stop)));
        self.spare = pages.into_batch().recycle();
        moved.map_err(Answer::Broken)
    }

    fn flow<'a>(&'a self, verb: Verb, stop: &'a AtomicBool) -> Flow<'a> {
        Flow {
            stagings: &self.shared.stagings,
            socket: self.socket,
            peer: self.peer,
            sends: verb == Verb::Get,
            stop,
        }
    }

    fn spans(&mut self, request: &Request, count: u32) -> Result<(), Answer> {
        let mut raw = vec![0; count as usize * WireSpan::SIZE];
        self.socket.read_exact(&mut raw, &self.never).map_err(Answer::Broken)?;
        let found = raw_spans(self.shared, self.peer, &raw, request.bytes).map_err(Answer::Refuse)?;
        let bytes = request.bytes;
        let mut pages = Pages::new(std::mem::take(&mut self.spare).recycle());
        if request.verb == Verb::Get {
            // An empty read asks whether the memory is still there; no stage is needed for it.
            let bytes_of = found.iter().filter(|(.., len)| *len > 0);
            let gpus = gpus_of(bytes_of.map(|(memory, ..)| memory));
            let flow = self.flow(request.verb, &self.never);
            pages.prepare(flow, &gpus, &self.never).map_err(Answer::Refuse)?;
            self.answer(bytes).map_err(Answer::Broken)?;
        }
        let moved = self.move_spans(request.verb, &found, &mut pages);
        self.spare = pages.into_batch().recycle();
        moved.map_err(Answer::Broken)?;
        if request.verb == Verb::Put {
            self.answer(bytes).map_err(Answer::Broken)?;
        }
        Ok(())
    }

    fn move_spans<'a>(&self, verb: Verb, found: &'a [Place], pages: &mut Pages<'a>) -> Result<()> {
        let flow = self.flow(verb, &self.never);
        for (region, offset, len) in found {
            pages.push(flow, region, *offset, *len)?;
        }
        pages.finish(flow)
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
