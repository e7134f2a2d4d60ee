//! One piece of work on one stream: requests, answers, and payload between them.

use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};

use pdkv_core::id::PeerKey;
use pdkv_core::plan::Plan;
use pdkv_core::span::Span;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::IoBatch;
use pdkv_device::cuda::Gpu;

use super::codec::Response;
use super::pages::{Flow, Pages, Stagings, gpus_of};
use super::socket::Socket;
use crate::transport::request::{MAX_SPANS, Request, Target, Verb, encode_spans};
use crate::transport::work::Program;
use crate::transport::{Direction, Work};

/// Requests kept in flight on one stream, so that the owner never waits for the next one.
const DEPTH: usize = 2;

/// One thread's turn on one stream.
pub(super) struct Stream<'a> {
    socket: &'a Socket,
    stagings: &'a Stagings,
    peer: PeerKey,
    work: &'a Work,
    batch: IoBatch<'a>,
    /// Requests whose answer is still to come, oldest first.
    sent: VecDeque<(Range<u64>, u64)>,
    /// Units that another stream was to bring, and brought nothing of.
    again: Vec<Range<u64>>,
    /// What was taken from the work before anything was answered.
    taken: Vec<Range<u64>>,
    answered: bool,
}

impl<'a> Stream<'a> {
    /// `again` are units of the work that nobody else will move.
    pub(super) fn new(
        socket: &'a Socket,
        stagings: &'a Stagings,
        peer: PeerKey,
        work: &'a Work,
        again: Vec<Range<u64>>,
    ) -> Self {
        Self {
            socket,
            stagings,
            peer,
            work,
            batch: IoBatch::new(),
            sent: VecDeque::with_capacity(DEPTH),
            again,
            taken: Vec::new(),
            answered: false,
        }
    }

    /// Whether the owner has answered anything.
    pub(super) fn is_answered(&self) -> bool {
        self.answered
    }

    /// After a failure: what another stream may bring instead, because this one ended before the owner had said a word. Only reads:
    /// bytes of a write may still be on their way.
    pub(super) fn into_unanswered(mut self) -> Option<Vec<Range<u64>>> {
        if self.answered || self.work.direction != Direction::Read {
            return None;
        }
        self.taken.append(&mut self.again);
        Some(self.taken)
    }

    fn claim(&mut self) -> Option<Range<u64>> {
        if self.work.failed() || self.work.stopped() {
            return None;
        }
        let units = self.again.pop().or_else(|| self.work.claim())?;
        if !self.answered {
            self.taken.push(units.clone());
        }
        Some(units)
    }

    /// Moves until the work is used up. After a failure the stream may be in the middle of a frame.
    pub(super) fn run(&mut self) -> Result<()> {
        loop {
            while self.sent.len() < DEPTH
                && let Some(units) = self.claim()
            {
                self.post(units)?;
            }
            let Some((units, bytes)) = self.sent.pop_front() else {
                return Ok(());
            };
            self.settle(&units, bytes)?;
            self.work.add_bytes(bytes);
        }
    }

    /// Sends one request; for writes, with its payload.
    fn post(&mut self, units: Range<u64>) -> Result<()> {
        match &self.work.program {
            Program::Own(walk) => {
                let bytes = walk.unit_bytes() * (units.end - units.start);
                let target = Target::Claim {
                    transfer: self.work.id(),
                    first_unit: units.start,
                    units: units.end - units.start,
                };
                self.send(target, bytes, &[], units)
            }
            Program::Joint(plan) => self.post_spans(plan, units),
        }
    }

    /// Names the peer's spans one by one, in as many requests as it takes.
    fn post_spans(&mut self, plan: &Plan, units: Range<u64>) -> Result<()> {
        for start in units.clone().step_by(MAX_SPANS) {
            let part = start..(start + MAX_SPANS as u64).min(units.end);
            let mut spans = Vec::new();
            let (count, bytes) = encode_spans(self.work, plan, part.clone(), &mut spans);
            if self.sent.len() == DEPTH
                && let Some((units, bytes)) = self.sent.pop_front()
            {
                self.settle(&units, bytes)?;
                self.work.add_bytes(bytes);
            }
            self.send(Target::Spans { count }, bytes, &spans, part)?;
        }
        Ok(())
    }

    fn send(&mut self, target: Target, bytes: u64, spans: &[u8], units: Range<u64>) -> Result<()> {
        let verb = Verb::from(self.work.direction);
        let mut head = Request { verb, target, bytes }.encode().to_vec();
        head.extend_from_slice(spans);
        self.socket.write_all(&head, &self.work.core.stop)?;
        if verb == Verb::Put {
            self.payload(&units)?;
        }
        self.sent.push_back((units, bytes));
        Ok(())
    }

    /// Reads the answer to the oldest request; for reads, with its payload.
    fn settle(&mut self, units: &Range<u64>, bytes: u64) -> Result<()> {
        let stop = &self.work.core.stop;
        let mut raw = [0; Response::SIZE];
        self.socket.read_exact(&mut raw, stop)?;
        self.answered = true;
        let response = Response::decode(&raw)?;
        if let Some(refusal) = response.refusal(self.socket, stop)? {
            return Err(refusal);
        }
        if response.bytes != bytes {
            return Err(Error::new(
                ErrorKind::Integrity,
                "tcp",
                format!(
                    "the peer holds `{}` bytes for units that are `{bytes}` bytes here",
                    response.bytes
                ),
            )
            .with_hint("the two layouts mean different things; compare the fingerprints"));
        }
        if self.work.direction == Direction::Read {
            self.payload(units)
        } else {
            Ok(())
        }
    }

    /// Scatters the next bytes of the stream into our pages, or gathers them from there.
    fn payload(&mut self, units: &Range<u64>) -> Result<()> {
        let work = self.work;
        let flow = Flow {
            stagings: self.stagings,
            socket: self.socket,
            peer: self.peer,
            sends: work.direction == Direction::Write,
            stop: &work.core.stop,
        };
        let mut pages = Pages::new(std::mem::take(&mut self.batch));
        if flow.sends {
            pages.prepare(flow, &self.gpus(units), flow.stop)?;
        }
        let mut bytes = 0;
        let mut failure = None;
        self.places(units, |span| {
            bytes += span.len;
            match pages.push(flow, &work.local[span.region as usize], span.offset, span.len) {
                Ok(()) => ControlFlow::Continue(()),
                Err(error) => {
                    failure = Some(error);
                    ControlFlow::Break(())
                }
            }
        });
        failure.map_or(Ok(()), Err)?;
        pages.finish(flow)?;
        // The owner stages all of it, if its memory is of a GPU.
        let far = work.remote.iter().any(|region| region.is_device());
        work.add_staged(if far { bytes } else { pages.staged });
        work.add_runs(pages.pieces);
        self.batch = pages.into_batch();
        Ok(())
    }

    /// Our places of some units, in the order of the stream.
    fn places(&self, units: &Range<u64>, mut visit: impl FnMut(Span) -> ControlFlow<()>) {
        let _ = match &self.work.program {
            Program::Own(walk) => walk.walk(units.clone(), visit),
            Program::Joint(plan) => plan.walk(units.clone(), |run| {
                let near = if self.work.direction == Direction::Read {
                    run.dst
                } else {
                    run.src
                };
                visit(Span {
                    region: near.region,
                    offset: near.offset,
                    len: run.len,
                })
            }),
        };
    }

    /// The GPUs whose pages some units are.
    fn gpus(&self, units: &Range<u64>) -> Vec<Gpu> {
        let local = &*self.work.local;
        let gpus = gpus_of(local.iter());
        if gpus.len() + usize::from(local.iter().any(|memory| memory.device().is_none())) < 2 {
            return gpus;
        }
        let mut touched = vec![false; local.len()];
        self.places(units, |span| {
            touched[span.region as usize] = true;
            ControlFlow::Continue(())
        });
        let memory = local.iter().zip(touched);
        gpus_of(memory.filter_map(|(memory, touched)| touched.then_some(memory)))
    }
}
