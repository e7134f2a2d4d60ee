//! Copies of plans on a GPU, for those who may not hold an address.
//!
//! What is copied between is handed over with the plan and kept until the GPU is done: that, and the plan's own proof that it
//! stays inside its regions, is what makes a launch safe. The owner of a [`Courier`] is one thread, which looks now and then at
//! what has arrived.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use pdkv_core::plan::Plan;
use pdkv_core::{Error, ErrorKind, Result};

use super::bulk_size::BulkSize;
use super::gpu::Gpu;
use super::host_paths::HostPaths;
use super::loader::Loader;
use super::queue::{CopyQueue, Ticket};
use super::reach::Reach;
use super::stream::Event;
use super::verdict::is_dead;
use super::verified;
use crate::region::read_only;

/// Streams of one courier: as many copies are under way side by side.
const LANES: usize = 4;

/// A plan to be copied.
#[derive(Debug)]
pub struct Cargo<T> {
    /// What goes where.
    pub plan: Plan,
    /// The plan's source regions, by their numbers.
    pub src: Arc<Vec<Reach>>,
    /// Its destination regions.
    pub dst: Arc<Vec<Reach>>,
    /// What the GPU waits for before it begins.
    pub after: Option<Arc<Event>>,
    /// Whether what lies at the destination afterwards is compared, by checksums, with what was read. Costs reading it once more.
    pub verify: bool,
    /// Whose it is: comes back with the outcome.
    pub owner: T,
}

/// A cargo that is not under way any more: nothing touches its memory.
#[derive(Debug)]
pub struct Landed<T> {
    /// Whose it was.
    pub owner: T,
    /// Whether every byte is placed.
    pub outcome: Result<()>,
}

/// Carries cargo on one GPU, on streams of its own. Dropping it waits for what is under way, and tells nobody: see [`close`](Self::close).
#[derive(Debug)]
pub struct Courier<T> {
    gpu: Gpu,
    lanes: Vec<Lane<T>>,
    /// What found no room yet.
    waiting: VecDeque<Cargo<T>>,
    loader: Loader,
    broken: bool,
}

/// Drop order: the queue waits for its stream, then what is under way lets go of its memory.
#[derive(Debug)]
struct Lane<T> {
    queue: CopyQueue,
    /// In the order of the stream.
    under_way: VecDeque<(Ticket, Cargo<T>)>,
}

impl<T> Courier<T> {
    /// Finds the GPU's kernels, which may take seconds the first time, and makes its streams.
    ///
    /// # Errors
    /// `Unsupported` without kernels for the GPU, `Device` when the driver fails.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        Self::make(gpu, None)
    }

    /// The same with a way between host and GPU, and one inside the GPU, that no measurement changes.
    ///
    /// # Errors
    /// As [`Courier::new`].
    pub fn forced(gpu: &Gpu, paths: HostPaths, bulk: BulkSize) -> Result<Self> {
        Self::make(gpu, Some((paths, bulk)))
    }

    fn make(gpu: &Gpu, forced: Option<(HostPaths, BulkSize)>) -> Result<Self> {
        let kernels = gpu.kernels()?;
        let lane = || {
            Ok(Lane {
                queue: CopyQueue::new(kernels)?,
                under_way: VecDeque::new(),
            })
        };
        Ok(Self {
            gpu: gpu.clone(),
            lanes: (0..LANES).map(|_| lane()).collect::<Result<_>>()?,
            waiting: VecDeque::new(),
            loader: Loader::new(kernels, forced),
            broken: false,
        })
    }

    /// Whether anything is under way.
    pub fn is_busy(&self) -> bool {
        !self.waiting.is_empty() || self.lanes.iter().any(|lane| !lane.under_way.is_empty())
    }

    /// Whether the GPU has failed, so that nothing can be carried any more.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Sends cargo on its way. Does not wait for it. What is refused comes back at once, and nothing touches its memory.
    ///
    /// # Errors
    /// `Region` when memory is smaller than the plan's regions, `Unsupported` when this GPU does not reach it, `Layout` and
    /// `Capacity` for what no launch can do, `Device` when the driver refuses.
    pub fn post(&mut self, cargo: Cargo<T>) -> Result<(), (T, Error)> {
        if let Err(error) = self.check(&cargo) {
            return Err((cargo.owner, error));
        }
        if !self.waiting.is_empty() {
            self.waiting.push_back(cargo);
            return Ok(());
        }
        match self.send(cargo) {
            Sent::Flying => Ok(()),
            Sent::Full(cargo) => {
                self.waiting.push_back(cargo);
                Ok(())
            }
            Sent::Refused(cargo, error) => Err((cargo.owner, error)),
        }
    }

    /// Cargo that waits for room and that nobody wants any more: it comes back without having been begun.
    pub fn give_up(&mut self, wanted: impl Fn(&T) -> bool) -> Vec<Landed<T>> {
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let (wait, over): (Vec<_>, Vec<_>) = waiting.partition(|cargo| wanted(&cargo.owner));
        self.waiting = wait.into();
        let text = "stopped before the copy was begun";
        let stopped = || Error::new(ErrorKind::TransferCancelled, OPERATION, text);
        over.into_iter().map(|cargo| Landed::failed(cargo, stopped())).collect()
    }

    /// The cargo that has landed since the last look.
    pub fn landed(&mut self) -> Vec<Landed<T>> {
        let mut landed = Vec::new();
        for lane in &mut self.lanes {
            self.broken |= lane.look(&mut landed);
        }
        while let Some(cargo) = self.waiting.pop_front() {
            match self.send(cargo) {
                Sent::Flying => {}
                Sent::Full(cargo) => {
                    self.waiting.push_front(cargo);
                    break;
                }
                Sent::Refused(cargo, error) => landed.push(Landed::failed(cargo, error)),
            }
        }
        landed
    }

    /// Waits until nothing is under way, and gives back all that was: after a failure nobody knows what else has failed.
    pub fn close(mut self) -> Vec<Landed<T>> {
        let mut landed = Vec::new();
        for lane in &mut self.lanes {
            // A driver that fails may go on all the same: what is not known to be over is asked for again.
            while !lane.look(&mut landed) && !lane.under_way.is_empty() {
                let _ = lane.queue.synchronize();
                std::thread::sleep(PAUSE);
            }
        }
        for cargo in self.waiting.drain(..) {
            let error = Error::new(ErrorKind::Device, OPERATION, "the GPU failed before the copy was begun");
            landed.push(Landed::failed(cargo, error));
        }
        landed
    }

    fn check(&self, cargo: &Cargo<T>) -> Result<()> {
        let [src, dst] = cargo.plan.region_bytes();
        for (bytes, reaches) in [(src, &cargo.src), (dst, &cargo.dst)] {
            let held =
                bytes.len() == reaches.len() && bytes.iter().zip(&**reaches).all(|(&bytes, at)| bytes <= at.len());
            if !held {
                let lens: Vec<_> = reaches.iter().map(Reach::len).collect();
                let message = format!("memory of `{lens:?}` bytes does not hold regions of `{bytes:?}`");
                return Err(Error::new(ErrorKind::Region, OPERATION, message));
            }
            reaches.iter().try_for_each(|reach| reach.reached_by(&self.gpu))?;
        }
        if !cargo.dst.iter().all(Reach::is_writable) {
            return Err(read_only(OPERATION));
        }
        Ok(())
    }

    fn send(&mut self, cargo: Cargo<T>) -> Sent<T> {
        // The least busy: what waits for an event holds up nobody as long as another stream is free.
        let Some(lane) = self.lanes.iter_mut().min_by_key(|lane| lane.under_way.len()) else {
            let error = Error::new(ErrorKind::Internal, OPERATION, "a courier without streams");
            return Sent::Refused(cargo, error);
        };
        // SAFETY: the plan stays inside regions that the cargo's memory holds, as was checked, and the GPU reaches all of it; the lane
        // keeps both until the post has passed. Bytes that others use meanwhile may tear, as in any shared memory.
        match unsafe { self.loader.load(&self.gpu, &mut lane.queue, &cargo) } {
            Ok(Some(ticket)) => {
                lane.under_way.push_back((ticket, cargo));
                Sent::Flying
            }
            Ok(None) => Sent::Full(cargo),
            Err(error) => {
                // Nothing of it is under way, so no look would ever find out. The error may be another GPU's, whose event this one was to wait for.
                let dead = is_dead(&error) && lane.queue.stream().done().is_err_and(|error| is_dead(&error));
                self.broken |= lane.queue.is_broken() || dead;
                Sent::Refused(cargo, error)
            }
        }
    }
}

/// How long a close waits between two looks.
const PAUSE: Duration = Duration::from_micros(100);

const OPERATION: &str = "copy on the GPU";

/// What came of sending.
enum Sent<T> {
    Flying,
    /// The tables of what is under way leave no room.
    Full(Cargo<T>),
    Refused(Cargo<T>, Error),
}

impl<T> Drop for Courier<T> {
    fn drop(&mut self) {
        for lane in &mut self.lanes {
            let _ = lane.queue.synchronize();
            lane.look(&mut Vec::new());
            // Memory that the GPU may still use is left to it.
            lane.under_way.drain(..).for_each(std::mem::forget);
        }
    }
}

impl<T> Landed<T> {
    fn failed(cargo: Cargo<T>, error: Error) -> Self {
        Self {
            owner: cargo.owner,
            outcome: Err(error),
        }
    }
}

impl<T> Lane<T> {
    /// Compares what the front's copy has read with what it has placed, where that was asked for.
    fn verify(&mut self, ticket: Ticket) -> Result<()> {
        match self.under_way.front() {
            Some((_, Cargo { plan, verify: true, .. })) => verified::pages(plan, self.queue.take_sums(ticket)),
            _ => Ok(()),
        }
    }

    /// Takes out what has landed. Whether the queue is broken: then that is all there was.
    fn look(&mut self, landed: &mut Vec<Landed<T>>) -> bool {
        while let Some((ticket, _)) = self.under_way.front() {
            let ticket = *ticket;
            let outcome = match self.queue.passed(ticket) {
                Ok(false) => return false,
                Ok(true) => self.verify(ticket),
                Err(error) => Err(error),
            };
            // One that failed by itself has passed all the same. In a dead context nothing passes, and nothing runs any more.
            if let (true, Err(error)) = (self.queue.is_broken(), &outcome) {
                let rest = self.under_way.drain(..);
                landed.extend(rest.map(|(_, cargo)| Landed::failed(cargo, error.clone())));
                return true;
            }
            let Some((_, cargo)) = self.under_way.pop_front() else {
                break;
            };
            landed.push(Landed {
                owner: cargo.owner,
                outcome,
            });
        }
        self.queue.is_broken()
    }
}
