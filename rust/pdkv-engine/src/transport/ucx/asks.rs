//! Active messages, the initiator's side: asks for units or spans on the side channel and exchanges one
//! message with the owner for each. What comes is placed by our own tables, once, and only if it was
//! asked for; anything else is dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use pdkv_core::span::Span;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_ucx::{Delivery, Inbox, Incoming, MemoryHandle, Piece, PieceMemory, Tally};

use super::codec::{Frame, misplaced};
use super::desk::Desk;
use super::door::{MESSAGES, Made};
use super::lane::{DRAIN, Rest, Role, lives, stuck};
use super::message::{MESSAGE_BYTES, delivery, header, id_of};
use crate::transport::request::{MAX_SPANS, Request, Target, Verb, encode_spans};
use crate::transport::work::Program;
use crate::transport::{Direction, Work};

/// Messages of one transfer under way at once, so that neither end waits for the other's next word.
const DEPTH: usize = 4;
/// Messages of all transfers under way at once; fewer than an owner takes on.
const MAX_ASKS: usize = 32;

/// The initiator of a lane of active messages.
#[derive(Default)]
pub(super) struct Asks {
    jobs: BTreeMap<u64, Job>,
    asked: BTreeMap<u64, Asked>,
    /// Requests that were given up here and that the owner still serves: they count as under way.
    given_up: BTreeSet<u64>,
    /// The last number given to a job or a request; 0 is the hello's.
    last: u64,
}

struct Job {
    work: Arc<Work>,
    local: Vec<Arc<MemoryHandle>>,
    /// What is left of the units that were taken last.
    units: Range<u64>,
    /// Requests under way.
    out: usize,
    /// Nothing is left to ask for.
    dry: bool,
    /// When it was first seen that this has to end before its time.
    stopped: Option<Instant>,
}

struct Asked {
    job: u64,
    units: Range<u64>,
    bytes: u64,
    tally: Tally,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The owner hasn't answered yet.
    Waiting,
    /// The payload is under way.
    Moving,
    /// The owner says that it has taken the payload.
    Taken,
    /// The owner has said or sent its last about this, and it was of no use.
    Over,
}

impl Role for Asks {
    fn hear(&mut self, desk: &mut Desk, made: &Made, frame: Frame) -> Result<()> {
        match frame {
            Frame::Go { id } => self.send(desk, made, id),
            Frame::Answer { id, code, bytes, text } => {
                self.answered(id, code, bytes, &text);
                Ok(())
            }
            other => Err(misplaced(&other)),
        }
    }

    fn step(&mut self, desk: &mut Desk, made: &Made) -> Result<bool> {
        let mut busy = false;
        while let Some(work) = desk.control.pop() {
            self.begin(desk, made, work);
            busy = true;
        }
        while let Some(message) = made.inbox.as_ref().and_then(Inbox::pop) {
            self.receive(message);
            busy = true;
        }
        busy |= self.settle(desk)?;
        self.look_at_flags()?;
        busy |= self.ask(desk, made)?;
        Ok(busy | self.finish())
    }

    fn watches(&self) -> bool {
        !self.jobs.is_empty()
    }

    fn give_up(self: Box<Self>) -> Rest {
        Rest {
            works: self.jobs.into_values().map(|job| job.work).collect(),
            ..Rest::default()
        }
    }
}

impl Asks {
    fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn begin(&mut self, desk: &Desk, made: &Made, work: Arc<Work>) {
        let shared = &desk.shared;
        let handle = |region| shared.ucx.memory(&shared.registry, &made.context, region);
        let local = match work.local.iter().map(handle).collect::<Result<Vec<_>>>() {
            Ok(local) => local,
            Err(error) => {
                work.fail(error);
                return work.leave();
            }
        };
        let job = Job {
            work,
            local,
            units: 0..0,
            out: 0,
            dry: false,
            stopped: None,
        };
        let number = self.next_number();
        self.jobs.insert(number, job);
    }

    /// Asks for more, one message a turn for each transfer.
    fn ask(&mut self, desk: &mut Desk, made: &Made) -> Result<bool> {
        let mut busy = false;
        loop {
            let mut asked = false;
            let Self {
                jobs,
                asked: open,
                given_up,
                last,
            } = self;
            for (&number, job) in jobs.iter_mut() {
                if job.out >= DEPTH || job.dry || job.over() || open.len() + given_up.len() >= MAX_ASKS {
                    continue;
                }
                let Some(units) = job.take() else {
                    job.dry = true;
                    continue;
                };
                let (request, spans) = job.request(&units);
                job.out += 1;
                *last += 1;
                let asking = Asked {
                    job: number,
                    units,
                    bytes: request.bytes,
                    tally: Tally::new(&made.worker),
                    stage: Stage::Waiting,
                };
                open.insert(*last, asking);
                desk.send(&Frame::Ask {
                    id: *last,
                    request,
                    spans,
                })?;
                asked = true;
            }
            if !asked {
                return Ok(busy);
            }
            busy = true;
        }
    }

    /// The owner waits for the payload of a put.
    fn send(&mut self, desk: &mut Desk, made: &Made, id: u64) -> Result<()> {
        let found = self.asked.get_mut(&id).filter(|asked| asked.stage == Stage::Waiting);
        let job = found.as_ref().and_then(|asked| self.jobs.get(&asked.job));
        let (Some(asked), Some(job), Some(endpoint)) = (found, job, &made.endpoint) else {
            // Given up meanwhile; the owner needn't wait.
            self.given_up.remove(&id);
            return desk.send(&Frame::Never { id });
        };
        if job.work.direction == Direction::Read {
            return Err(misplaced(&Frame::Go { id }));
        }
        let (pieces, how) = (job.pieces(&asked.units), delivery(asked.bytes));
        asked.stage = Stage::Moving;
        if let Err(error) = endpoint.send_message(MESSAGES, &header(id), &pieces, how, &asked.tally) {
            job.work.fail(error);
        }
        job.work.add_runs(pieces.len() as u64);
        if how == Delivery::Eager {
            job.work.add_staged(asked.bytes);
        }
        Ok(())
    }

    /// A message came: if it is the payload that was asked for, and for the first time, it is placed.
    fn receive(&mut self, message: Incoming) {
        let waiting = |asked: &&mut Asked| asked.stage == Stage::Waiting;
        let Some(id) = id_of(&message.header) else { return };
        self.given_up.remove(&id);
        let asked = self.asked.get_mut(&id);
        let Some(asked) = asked.filter(waiting) else { return };
        let Some(job) = self.jobs.get(&asked.job) else { return };
        if job.work.direction == Direction::Write {
            return;
        }
        if job.over() {
            asked.stage = Stage::Over;
            return;
        }
        asked.stage = Stage::Moving;
        if message.len() != asked.bytes {
            return job.work.fail(other_size(message.len(), asked.bytes));
        }
        if message.staged() {
            job.work.add_staged(asked.bytes);
        }
        let pieces = job.pieces(&asked.units);
        job.work.add_runs(pieces.len() as u64);
        if let Err(error) = message.receive(&pieces, &asked.tally) {
            job.work.fail(error);
        }
    }

    /// The owner has taken the payload of a put, or refuses.
    fn answered(&mut self, id: u64, code: u16, bytes: u64, text: &str) {
        // A late answer is to nobody.
        self.given_up.remove(&id);
        let Some(asked) = self.asked.get_mut(&id) else { return };
        let Some(job) = self.jobs.get(&asked.job) else { return };
        let moved = asked.stage == Stage::Moving && job.work.direction == Direction::Write;
        asked.stage = if moved && code == 0 && bytes == asked.bytes {
            Stage::Taken
        } else {
            Stage::Over
        };
        match code {
            0 if asked.stage == Stage::Taken => {}
            0 => job.work.fail(other_size(bytes, asked.bytes)),
            code => {
                let kind = ErrorKind::from_code(u32::from(code));
                job.work
                    .fail(Error::new(kind, "lane", format!("the peer refused: {text}")));
            }
        }
    }

    /// Takes note of what has arrived, and of what never will.
    fn settle(&mut self, desk: &mut Desk) -> Result<bool> {
        let mut done = Vec::new();
        for (&id, asked) in &self.asked {
            let Some(job) = self.jobs.get(&asked.job) else { continue };
            if asked.tally.outstanding() > 0 {
                continue;
            }
            let reads = job.work.direction == Direction::Read;
            let whole = asked.stage == Stage::Taken || (asked.stage == Stage::Moving && reads);
            if let Some(error) = asked.tally.failure() {
                job.work.fail(error.clone());
                lives(error)?;
            } else if whole && !job.work.failed() {
                job.work.add_bytes(asked.bytes);
                done.push((id, false));
                continue;
            }
            if job.over() {
                // A put whose payload wasn't sent, or not all of it, is waited for by the owner.
                done.push((id, !reads && asked.stage == Stage::Moving));
            }
        }
        for (id, never) in &done {
            if let Some(asked) = self.asked.remove(id)
                && let Some(job) = self.jobs.get_mut(&asked.job)
            {
                job.out -= 1;
                let reads = job.work.direction == Direction::Read;
                // Neither its message nor the owner's last word has come yet.
                if asked.stage == Stage::Waiting || (asked.stage == Stage::Moving && !reads) {
                    self.given_up.insert(*id);
                }
            }
            if *never {
                desk.send(&Frame::Never { id: *id })?;
            }
        }
        Ok(!done.is_empty())
    }

    fn look_at_flags(&mut self) -> Result<()> {
        for job in self.jobs.values_mut().filter(|job| job.over()) {
            let since = *job.stopped.get_or_insert_with(Instant::now);
            if since.elapsed() > DRAIN && job.out > 0 {
                return Err(stuck());
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> bool {
        let before = self.jobs.len();
        self.jobs.retain(|_, job| {
            let left = job.out > 0 || !(job.dry || job.over());
            if !left {
                job.work.leave();
            }
            left
        });
        self.jobs.len() < before
    }
}

impl Job {
    /// Whether it has to end before its last byte.
    fn over(&self) -> bool {
        self.work.failed() || self.work.core.stop.load(Ordering::Relaxed)
    }

    /// The units of the next message.
    fn take(&mut self) -> Option<Range<u64>> {
        if self.units.is_empty() {
            self.units = self.work.claim()?;
        }
        let (program, most) = (&self.work.program, MAX_SPANS as u64);
        let count = match program {
            Program::Own(walk) => MESSAGE_BYTES / walk.unit_bytes().max(1),
            Program::Joint(plan) => (MESSAGE_BYTES / plan.unit_bytes_hint().max(1)).min(most),
        };
        let end = self.units.start.saturating_add(count.max(1)).min(self.units.end);
        let taken = self.units.start..end;
        self.units.start = end;
        Some(taken)
    }

    fn request(&self, units: &Range<u64>) -> (Request, Vec<u8>) {
        let count = units.end - units.start;
        let verb = Verb::from(self.work.direction);
        let mut spans = Vec::new();
        let (target, bytes) = match &self.work.program {
            Program::Own(walk) => {
                let target = Target::Claim {
                    transfer: self.work.id(),
                    first_unit: units.start,
                    units: count,
                };
                (target, walk.unit_bytes() * count)
            }
            Program::Joint(plan) => {
                let (count, bytes) = encode_spans(&self.work, plan, units.clone(), &mut spans);
                (Target::Spans { count }, bytes)
            }
        };
        (Request { verb, target, bytes }, spans)
    }

    /// Our places of these units, in the order in which their bytes travel.
    fn pieces(&self, units: &Range<u64>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut add = |span: Span| {
            pieces.push(Piece {
                memory: PieceMemory::Mapped(Arc::clone(&self.local[span.region as usize])),
                offset: span.offset,
                len: span.len,
            });
            ControlFlow::Continue(())
        };
        let _ = match &self.work.program {
            Program::Own(walk) => walk.walk(units.clone(), add),
            Program::Joint(plan) => plan.walk(units.clone(), |run| {
                let near = match self.work.direction {
                    Direction::Read => run.dst,
                    Direction::Write => run.src,
                };
                add(Span {
                    region: near.region,
                    offset: near.offset,
                    len: run.len,
                })
            }),
        };
        pieces
    }
}

fn other_size(theirs: u64, ours: u64) -> Error {
    Error::new(
        ErrorKind::Integrity,
        "lane",
        format!("the peer moved `{theirs}` bytes for units that are `{ours}` bytes here"),
    )
    .with_hint("the two layouts mean different things; compare the fingerprints")
}
