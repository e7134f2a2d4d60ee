//! The owner's side of a lane: hands out keys where put and get were agreed on, and serves requests where
//! messages were. Every request is judged as on any other transport; what nobody asked for is dropped.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pdkv_core::id::{PeerKey, RegionId};
use pdkv_core::lane::{Carrier, Manner};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_ucx::{Delivery, Inbox, Incoming, MESSAGE_MAX_PIECES, MemoryHandle, Piece, PieceMemory, Tally};

use super::codec::{Frame, misplaced};
use super::desk::Desk;
use super::door::{HELLO, MESSAGES, Made};
use super::lane::{DRAIN, Rest, Role, lives, stuck};
use super::message::{delivery, header, id_of};
use super::trial::unsupported;
use crate::transport::request::{Request, Target, Verb};
use crate::transport::serving::{Permit, Place, raw_spans};

/// Requests of one lane being served at once.
const MAX_SERVED: usize = 64;

/// The owner of memory on one lane.
pub(super) struct Owner {
    peer: PeerKey,
    served: BTreeMap<u64, Served>,
    /// The initiator's first message, which the door has seen, wants an answer.
    greets: bool,
    /// Counts that answer.
    greeting: Option<Tally>,
    /// What the peer has keys of and UCX itself reads and writes, with nothing that refuses it. Kept until the
    /// worker is gone.
    lent: Vec<(RegionId, Arc<MemoryHandle>)>,
}

struct Served {
    verb: Verb,
    bytes: u64,
    /// Our places of the bytes, in the order in which they travel.
    pieces: Vec<Piece>,
    /// For units of a claim.
    permit: Option<Permit>,
    tally: Tally,
    /// Whether the payload is under way; puts wait for it first.
    moving: bool,
    failure: Option<Error>,
    /// When the claim was first seen to be over.
    stopped: Option<Instant>,
}

impl Owner {
    pub(super) fn new(peer: PeerKey, manner: Manner) -> Self {
        Self {
            peer,
            served: BTreeMap::new(),
            greets: manner == Manner::ActiveMessages,
            greeting: None,
            lent: Vec::new(),
        }
    }
}

impl Role for Owner {
    fn hear(&mut self, desk: &mut Desk, made: &Made, frame: Frame) -> Result<()> {
        match (made.manner, frame) {
            (Manner::OneSided, Frame::WantKey { region }) => {
                let answer = match self.key_of(desk, made, region) {
                    Ok(frame) => frame,
                    Err(error) => Frame::NoKey {
                        region,
                        reason: error.message().to_owned(),
                    },
                };
                desk.send(&answer)
            }
            (Manner::OneSided, Frame::Land { id, region }) => {
                let seen = self.see(desk, region);
                let reason = seen.err().map(|error| error.message().to_owned()).unwrap_or_default();
                desk.send(&Frame::Landed { id, reason })
            }
            (Manner::ActiveMessages, Frame::Ask { id, request, spans }) => {
                match self.take_on(desk, made, id, &request, &spans) {
                    Ok(()) => Ok(()),
                    Err(error) => refuse(desk, id, &error),
                }
            }
            (Manner::ActiveMessages, Frame::Never { id }) => {
                // What is under way already ends by itself, and each request with an answer: the initiator counts on it.
                if self.served.get(&id).is_none_or(|served| served.moving) {
                    return Ok(());
                }
                self.served.remove(&id);
                let text = "the payload was called off";
                refuse(desk, id, &Error::new(ErrorKind::TransferCancelled, "serve", text))
            }
            (_, other) => Err(misplaced(&other)),
        }
    }

    fn step(&mut self, desk: &mut Desk, made: &Made) -> Result<bool> {
        self.check_lent(desk)?;
        let mut busy = false;
        while let Some(message) = made.inbox.as_ref().and_then(Inbox::pop) {
            self.receive(desk, message);
            busy = true;
        }
        self.greet(made)?;
        let ids: Vec<_> = self.served.keys().copied().collect();
        for id in ids {
            busy |= self.settle(desk, id)?;
        }
        Ok(busy)
    }

    fn watches(&self) -> bool {
        !self.served.is_empty() || (self.greets && self.greeting.is_none())
    }

    fn give_up(self: Box<Self>) -> Rest {
        let mut permits = Vec::new();
        for served in self.served.into_values() {
            if let Some(mut permit) = served.permit {
                if served.verb == Verb::Put {
                    permit.fail(&Error::new(ErrorKind::PeerLost, "serve", "the lane ended halfway"));
                }
                permits.push(permit);
            }
        }
        Rest {
            permits,
            lent: self.lent.into_iter().map(|(_, handle)| handle).collect(),
            ..Rest::default()
        }
    }
}

impl Owner {
    /// Judges a request and begins to serve it.
    fn take_on(&mut self, desk: &mut Desk, made: &Made, id: u64, request: &Request, spans: &[u8]) -> Result<()> {
        if id == 0 || self.served.contains_key(&id) || self.served.len() >= MAX_SERVED {
            let text = format!("request `{id}` is one too many, or of a number in use");
            return Err(Error::new(ErrorKind::Capacity, "serve", text));
        }
        let (permit, pieces): (_, Vec<Piece>) = match request.target {
            Target::Claim { .. } => {
                let permit = Permit::new(&desk.shared, self.peer, request)?;
                let pieces = pieces_of(desk, made, &permit)?;
                (Some(permit), pieces)
            }
            Target::Spans { .. } => {
                let found = raw_spans(&desk.shared, self.peer, spans, request.bytes)?;
                let piece = |(region, offset, len): &Place| {
                    let memory = PieceMemory::Mapped(handle(desk, made, region)?);
                    Ok(Piece {
                        memory,
                        offset: *offset,
                        len: *len,
                    })
                };
                (None, found.iter().map(piece).collect::<Result<_>>()?)
            }
        };
        if pieces.len() > MESSAGE_MAX_PIECES {
            let text = format!(
                "a request of `{}` pieces; `{MESSAGE_MAX_PIECES}` is the most",
                pieces.len()
            );
            return Err(Error::new(ErrorKind::Capacity, "serve", text));
        }
        let mut served = Served {
            verb: request.verb,
            bytes: request.bytes,
            pieces,
            permit,
            tally: Tally::new(&made.worker),
            moving: false,
            failure: None,
            stopped: None,
        };
        match request.verb {
            Verb::Get => {
                let endpoint = made.endpoint.as_ref().ok_or_else(no_endpoint)?;
                let how = delivery(request.bytes);
                endpoint.send_message(MESSAGES, &header(id), &served.pieces, how, &served.tally)?;
                served.moving = true;
            }
            Verb::Put => desk.send(&Frame::Go { id })?,
        }
        self.served.insert(id, served);
        Ok(())
    }

    /// A message came: the payload of a put that is waited for, or nothing of interest.
    fn receive(&mut self, desk: &Desk, message: Incoming) {
        let waiting = |served: &&mut Served| served.verb == Verb::Put && !served.moving && !served.over();
        let served = id_of(&message.header).and_then(|id| self.served.get_mut(&id));
        let Some(served) = served.filter(waiting) else { return };
        served.moving = true;
        // Raw regions may have been deregistered since they were asked for; claims say so themselves.
        let lent = |piece: &Piece| {
            let region = piece.memory.region();
            region.is_ok_and(|region| desk.shared.registry.lends(region))
        };
        let outcome = if served.permit.is_none() && !served.pieces.iter().all(lent) {
            let text = "a region was deregistered before the payload came";
            Err(Error::new(ErrorKind::Region, "serve", text))
        } else if message.len() == served.bytes {
            message.receive(&served.pieces, &served.tally)
        } else {
            let text = format!("a payload of `{}` bytes, `{}` announced", message.len(), served.bytes);
            Err(Error::new(ErrorKind::Layout, "serve", text))
        };
        if let Err(error) = outcome {
            // The offer holds less than was said; its claim is taken back with the permit.
            served.failure = Some(error);
        }
    }

    /// What the peer needs to reach a region of ours.
    fn key_of(&mut self, desk: &Desk, made: &Made, id: RegionId) -> Result<Frame> {
        let region = desk.shared.registry.region_for(self.peer, id)?;
        if let Some(device) = region.memory.device() {
            device.still_there()?;
            device.gpu().may_see_arrivals().map_err(unsupported)?;
        }
        let handle = handle(desk, made, &region.memory)?;
        let key = handle.pack()?;
        // What carries memory of a GPU was not agreed on; where UCX emulates anything for this peer, it may be that.
        let emulated = made.carrier == Carrier::Emulated
            || (region.memory.device().is_some() && made.context.features().one_sided);
        if emulated && self.lent.iter().all(|(lent, _)| *lent != id) {
            self.lent.push((id, handle));
        }
        Ok(Frame::Key {
            region: id,
            base: region.memory.address(),
            len: region.memory.len(),
            key,
        })
    }

    /// Has the GPU of a region see what the peer's adapter has put there.
    fn see(&self, desk: &Desk, id: RegionId) -> Result<()> {
        let region = desk.shared.registry.region_for(self.peer, id)?;
        region
            .memory
            .device()
            .map_or(Ok(()), |device| device.gpu().see_arrivals())
    }

    /// An adapter and the kernel refuse memory that is gone; UCX would read it. So the lane goes before the memory does.
    fn check_lent(&self, desk: &Desk) -> Result<()> {
        match self
            .lent
            .iter()
            .find(|(_, handle)| !desk.shared.registry.holds(handle.region()))
        {
            None => Ok(()),
            Some((id, _)) => {
                let text = format!("region `{id}` was deregistered, and this lane's peer could still reach it");
                Err(Error::new(ErrorKind::Region, "lane", text))
            }
        }
    }

    /// Answers the initiator's first message, once, as soon as the connection stands from this side too.
    fn greet(&mut self, made: &Made) -> Result<()> {
        if self.greets
            && self.greeting.is_none()
            && let Some(endpoint) = &made.endpoint
            && endpoint.ready()
        {
            let tally = Tally::new(&made.worker);
            endpoint.send_message(MESSAGES, &HELLO, &[], Delivery::Eager, &tally)?;
            self.greeting = Some(tally);
        }
        Ok(())
    }

    /// Ends what is done, and what is over before that.
    fn settle(&mut self, desk: &mut Desk, id: u64) -> Result<bool> {
        let Some(served) = self.served.get_mut(&id) else {
            return Ok(false);
        };
        if served.over() {
            let since = *served.stopped.get_or_insert_with(Instant::now);
            if served.tally.outstanding() > 0 && since.elapsed() > DRAIN {
                return Err(stuck());
            }
        }
        if served.tally.outstanding() > 0 || !(served.moving || served.over()) {
            return Ok(false);
        }
        let Some(mut served) = self.served.remove(&id) else {
            return Ok(false);
        };
        let cancelled = || {
            Error::new(
                ErrorKind::TransferCancelled,
                "serve",
                "the claim ended before the payload came",
            )
        };
        let failure = served.failure.take().or_else(|| served.tally.failure());
        let failure = failure.or_else(|| (!served.moving).then(cancelled));
        match (failure, served.verb) {
            (None, Verb::Get) => Ok(true),
            (None, Verb::Put) => {
                let bytes = served.bytes;
                // The fence must not find a claim that is still being served once the peer knows.
                drop(served);
                let done = Frame::Answer {
                    id,
                    code: 0,
                    bytes,
                    text: String::new(),
                };
                desk.send(&done).map(|()| true)
            }
            (Some(error), verb) => {
                // A reader that can't be served says so itself; a writer that stops halfway makes the offer useless.
                if let (Verb::Put, Some(permit)) = (verb, &mut served.permit) {
                    permit.fail(&error);
                }
                drop(served);
                refuse(desk, id, &error)?;
                lives(error).map(|()| true)
            }
        }
    }
}

impl Served {
    /// Whether the claim has ended: no more bytes of it are to move.
    fn over(&self) -> bool {
        let ended = |permit: &Permit| permit.serving.ended.load(Ordering::Acquire);
        self.permit.as_ref().is_some_and(ended)
    }
}

fn refuse(desk: &mut Desk, id: u64, error: &Error) -> Result<()> {
    desk.send(&Frame::Answer {
        id,
        code: error.kind() as u16,
        bytes: 0,
        text: error.message().to_owned(),
    })
}

fn handle(desk: &Desk, made: &Made, memory: &Memory) -> Result<Arc<MemoryHandle>> {
    let shared = &desk.shared;
    if made.manner == Manner::ActiveMessages {
        // Messages gather and scatter where a processor reaches.
        memory.host()?;
    }
    shared.ucx.memory(&shared.registry, &made.context, memory)
}

fn pieces_of(desk: &Desk, made: &Made, permit: &Permit) -> Result<Vec<Piece>> {
    let regions = &permit.serving.regions;
    let handles = regions
        .iter()
        .map(|region| handle(desk, made, region))
        .collect::<Result<Vec<_>>>()?;
    let mut pieces = Vec::new();
    let _ = permit.serving.walk.walk(permit.units.clone(), |span| {
        pieces.push(Piece {
            memory: PieceMemory::Mapped(Arc::clone(&handles[span.region as usize])),
            offset: span.offset,
            len: span.len,
        });
        ControlFlow::Continue(())
    });
    Ok(pieces)
}

fn no_endpoint() -> Error {
    Error::new(ErrorKind::Internal, "lane", "a lane of messages has no endpoint")
}
