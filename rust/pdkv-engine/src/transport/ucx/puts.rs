//! Put and get between block tables, posted by the initiator alone. Large and small transfers take turns
//! chunk by chunk, a bounded number of operations is under way for each, and neighbours are merged by
//! the plan before anything is posted.

mod posting;

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use pdkv_core::id::RegionId;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_ucx::{MemoryHandle, RemoteKey, Tally};

use super::codec::{Frame, misplaced};
use super::desk::Desk;
use super::devices::{self, Devices};
use super::door::Made;
use super::lane::{DRAIN, Rest, Role, lives, stuck};
use crate::remote::RemoteRegion;
use crate::transport::{Direction, Work};
use posting::{Halt, Posting};

/// Operations of one transfer under way at once. More gain nothing on any transport that was measured.
const WINDOW: u64 = 256;
/// Operations posted in one call.
const BATCH: usize = 64;
/// Calls of UCX while it moves on, before the side channel is looked at, which costs a system call; and those in
/// a row that moved nothing, before others get the core.
const LOOK: u32 = 256;
const PATIENT: u32 = 16;

/// The initiator of a one-sided lane.
pub(super) struct Puts {
    jobs: Vec<Job>,
    keys: HashMap<RegionId, Known>,
    /// What is known of memory of GPUs, to be set right where a pair of regions shows otherwise.
    devices: Arc<Devices>,
    /// The last number given to a question about what has landed.
    last: u64,
}

struct Known {
    /// The region as transfers hold it; when nobody does, its key is of no use to anybody.
    region: Weak<RemoteRegion>,
    key: Key,
}

impl Known {
    /// Whether transfers may want it, or its answer is still to come.
    fn is_of_use(&self) -> bool {
        self.region.strong_count() > 0 || matches!(self.key, Key::Asked)
    }
}

enum Key {
    Asked,
    Have(Rc<RemoteKey>),
    Refused(String),
}

struct Job {
    work: Arc<Work>,
    tally: Tally,
    local: Vec<Arc<MemoryHandle>>,
    remote: Vec<Rc<RemoteKey>>,
    /// Regions of the peer's, one of each GPU that is written to, of which it hasn't said that the GPU sees them.
    unseen: Vec<RegionId>,
    /// Pairs of regions with memory of a GPU whose first piece showed what carries it.
    seen: Vec<(u32, u32)>,
    stage: Stage,
    bytes: u64,
    runs: u64,
    /// When it was first seen that this has to end before its time.
    stopped: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Keys are on their way.
    Waiting,
    Posting,
    /// Everything is posted.
    Draining,
    /// Everything has arrived, and the peer is asked whether its GPU sees it: by this number.
    Landing(u64),
}

impl Role for Puts {
    fn hear(&mut self, _desk: &mut Desk, made: &Made, frame: Frame) -> Result<()> {
        let (id, key) = match frame {
            Frame::Key { region, base, len, key } => {
                let Some(known) = self.keys.get(&region) else {
                    return Err(unasked(region));
                };
                (region, unpack(made, known, (base, len), &key))
            }
            Frame::NoKey { region, reason } => (region, Key::Refused(reason)),
            Frame::Landed { id, reason } => return self.landed(id, &reason),
            other => return Err(misplaced(&other)),
        };
        match self.keys.get_mut(&id) {
            Some(known) if matches!(known.key, Key::Asked) => known.key = key,
            _ => return Err(unasked(id)),
        }
        Ok(())
    }

    fn step(&mut self, desk: &mut Desk, made: &Made) -> Result<bool> {
        let mut busy = false;
        while let Some(work) = desk.control.pop() {
            self.begin(desk, made, work)?;
            busy = true;
        }
        let mut at = 0;
        while at < self.jobs.len() {
            let job = &mut self.jobs[at];
            busy |= job.step(desk, made, &self.keys, &self.devices)?;
            // A peer that doesn't answer holds nobody up longer than the work may take.
            let drained = match job.stage {
                Stage::Draining => job.tally.outstanding() == 0,
                Stage::Landing(_) => job.over(),
                Stage::Waiting | Stage::Posting => false,
            };
            if drained && let Some(region) = job.to_be_seen() {
                self.last += 1;
                job.stage = Stage::Landing(self.last);
                desk.send(&Frame::Land { id: self.last, region })?;
            } else if drained {
                self.jobs.swap_remove(at).finish()?;
                busy = true;
            } else {
                at += 1;
            }
        }
        Ok(busy)
    }

    fn watches(&self) -> bool {
        !self.jobs.is_empty()
    }

    fn give_up(self: Box<Self>) -> Rest {
        Rest {
            works: self.jobs.into_iter().map(|job| job.work).collect(),
            ..Rest::default()
        }
    }
}

impl Puts {
    pub(super) fn new(devices: Arc<Devices>) -> Self {
        Self {
            jobs: Vec::new(),
            keys: HashMap::new(),
            devices,
            last: 0,
        }
    }

    /// The peer's GPU sees what was put there, or doesn't.
    fn landed(&mut self, id: u64, reason: &str) -> Result<()> {
        let Some(job) = self.jobs.iter_mut().find(|job| job.stage == Stage::Landing(id)) else {
            if id <= self.last {
                // Its work has ended meanwhile.
                return Ok(());
            }
            let text = format!("the peer answered question `{id}`, which was not asked");
            return Err(Error::new(ErrorKind::Integrity, "lane", text));
        };
        job.unseen.pop();
        if !reason.is_empty() {
            let text = format!("the peer's GPU doesn't see what was written: {reason}");
            job.work.fail(Error::new(ErrorKind::Device, "lane", text));
            job.unseen.clear();
        }
        job.stage = Stage::Draining;
        Ok(())
    }

    fn begin(&mut self, desk: &mut Desk, made: &Made, work: Arc<Work>) -> Result<()> {
        let shared = Arc::clone(&desk.shared);
        let handle = |region| shared.ucx.memory(&shared.registry, &made.context, region);
        let local = match work.local.iter().map(handle).collect::<Result<Vec<_>>>() {
            Ok(local) => local,
            Err(error) => {
                work.fail(error);
                work.leave();
                return Ok(());
            }
        };
        // Entered first: whatever ends the lane from here on finds it and ends it too.
        let remote = Arc::clone(&work.remote);
        self.jobs.push(Job {
            tally: Tally::new(&made.worker),
            unseen: unseen(&work),
            seen: Vec::new(),
            work,
            local,
            remote: Vec::new(),
            stage: Stage::Waiting,
            bytes: 0,
            runs: 0,
            stopped: None,
        });
        for region in remote.iter() {
            let known = self.keys.get(&region.id).map(|known| &known.key);
            // What was refused once may have been refused for want of memory.
            if !matches!(known, Some(Key::Asked | Key::Have(_))) {
                self.keys.retain(|_, known| known.is_of_use());
                let known = Known {
                    region: Arc::downgrade(region),
                    key: Key::Asked,
                };
                self.keys.insert(region.id, known);
                desk.send(&Frame::WantKey { region: region.id })?;
            }
        }
        Ok(())
    }
}

/// A region of each GPU that a work writes to.
fn unseen(work: &Work) -> Vec<RegionId> {
    if work.direction == Direction::Read {
        return Vec::new();
    }
    devices::gpus_of(&work.remote)
}

/// Makes a key usable, if it fits what the region was advertised as.
fn unpack(made: &Made, known: &Known, (base, len): (u64, u64), key: &[u8]) -> Key {
    let advertised = known.region.upgrade().map_or(len, |region| region.len);
    if len != advertised {
        return Key::Refused(format!("its key is for `{len}` bytes of `{advertised}`"));
    }
    let endpoint = made.endpoint.as_ref().ok_or_else(no_endpoint);
    match endpoint.and_then(|endpoint| endpoint.unpack(key, base, len)) {
        Ok(key) => Key::Have(Rc::new(key)),
        Err(error) => Key::Refused(error.message().to_owned()),
    }
}

impl Job {
    fn step(
        &mut self,
        desk: &mut Desk,
        made: &Made,
        keys: &HashMap<RegionId, Known>,
        devices: &Devices,
    ) -> Result<bool> {
        if self.over() && self.stopped.is_none() {
            self.stopped = Some(Instant::now());
        }
        if self.stopped.is_some_and(|at| at.elapsed() > DRAIN) && self.tally.outstanding() > 0 {
            return Err(stuck());
        }
        match self.stage {
            Stage::Waiting => Ok(self.take_keys(keys)),
            Stage::Posting => self.post_chunk(desk, made, devices).map(|()| true),
            Stage::Draining | Stage::Landing(_) => Ok(false),
        }
    }

    /// Whether it has to end before its last byte.
    fn over(&self) -> bool {
        self.work.failed() || self.work.core.stop.load(Ordering::Relaxed) || self.tally.failed() > 0
    }

    fn take_keys(&mut self, keys: &HashMap<RegionId, Known>) -> bool {
        if self.over() {
            self.stage = Stage::Draining;
            return true;
        }
        let mut found = Vec::with_capacity(self.work.remote.len());
        for region in self.work.remote.iter() {
            match keys.get(&region.id).map(|known| &known.key) {
                Some(Key::Have(key)) => found.push(Rc::clone(key)),
                Some(Key::Refused(reason)) => {
                    let text = format!("region `{}` of the peer can't be reached: {reason}", region.id);
                    self.work.fail(Error::new(ErrorKind::Region, "lane", text));
                    self.stage = Stage::Draining;
                    return true;
                }
                Some(Key::Asked) | None => return false,
            }
        }
        self.remote = found;
        self.stage = Stage::Posting;
        true
    }

    fn post_chunk(&mut self, desk: &mut Desk, made: &Made, devices: &Devices) -> Result<()> {
        let endpoint = made.endpoint.as_ref().ok_or_else(no_endpoint)?;
        let units = if self.over() { None } else { self.work.claim() };
        let Some(units) = units else {
            self.stage = Stage::Draining;
            if self.work.direction == Direction::Write && self.bytes > 0 {
                // A finished put only gives the source back; a flush after it says that it has arrived. One
                // that fails is counted as any operation is.
                let _ = endpoint.flush(&self.tally);
            }
            return Ok(());
        };
        let mut posting = Posting {
            job: self,
            desk,
            made,
            devices,
            endpoint,
            pair: (0, 0),
            spans: Vec::with_capacity(BATCH),
        };
        match posting.walk(units) {
            Err(Halt::Lane(error)) => Err(error),
            // What failed is in the tally or in the work, and the next step sees it.
            Err(Halt::Work) | Ok(()) => Ok(()),
        }
    }

    /// A region whose GPU has yet to see what was written, if that is of any use still.
    fn to_be_seen(&self) -> Option<RegionId> {
        let useless = self.over() || self.bytes == 0;
        self.unseen.last().copied().filter(|_| !useless)
    }

    /// Ends the work; what failed because of the connection ends the lane too.
    fn finish(self) -> Result<()> {
        let failure = self.tally.failure();
        let seen = match self.work.direction {
            Direction::Read if failure.is_none() => devices::see_arrivals(&self.work.local),
            _ => Ok(()),
        };
        if let Some(error) = failure.clone().or(seen.err()) {
            self.work.fail(error);
        } else {
            self.work.add_bytes(self.bytes);
            self.work.add_runs(self.runs);
        }
        self.work.leave();
        failure.map_or(Ok(()), lives)
    }
}

pub(super) fn no_endpoint() -> Error {
    Error::new(ErrorKind::Internal, "lane", "an initiator's lane has no endpoint")
}

fn unasked(region: RegionId) -> Error {
    Error::new(
        ErrorKind::Integrity,
        "lane",
        format!("the peer answered for region `{region}`, which was not asked for"),
    )
}
