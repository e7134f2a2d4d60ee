//! A queue of copies on a stream of its own: posting waits for nothing and, once warm, allocates nothing.
//!
//! A post is one copy of its tables to the device, a launch (nearly always one), and an event; lanes that were met before lie there already. One
//! thread owns a queue. Whether memory may be touched is the caller's business, what happened to a post this file's.
//!
//! Who looks reads the [`Flag`], and asks the driver nothing as long as posts tell their ends by it. What is told so is over for everybody but the driver: no
//! thread of the launch touches memory after the word, so its pages may be freed and unmapped, as they may be under a kernel that has never touched them. What
//! the stream still does then, or the driver, is the queue's own business: its tables are used again in the order of the stream, and freed
//! when the stream has been waited for. The event is the word on failures, since a context that has died raises no flag, and on posts that have none.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use pdkv_core::{Error, ErrorKind, Result};

use super::batch_lists::BatchLists;
use super::context::Context;
use super::ends::Ends;
use super::flag::Flag;
use super::lane_tables::LaneTables;
use super::memory::DeviceBuffer;
use super::module::Extent;
use super::pages::Kernels;
use super::post_layout::{Layout, check_tables};
use super::post_tables::PostTables;
use super::stream::{Event, Stream};
use super::verdict::is_dead;
use crate::kernels::{self, Jobs, Lane, Launch, Run, View, Wishes};

/// A post, by the number of those before it in its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

impl Ticket {
    /// What the flag of its queue is raised to when the post is over.
    pub fn flag(self) -> u64 {
        self.0 + 1
    }
}

/// How long nothing may be heard of what is under way before the driver is asked about it. So late a failure is seen at most, and so seldom a long copy costs a
/// call that others of the process may have to wait for.
const SILENCE: Duration = Duration::from_millis(2);
/// How long to wait before a driver is asked again that did not say whether something runs.
const RETRY: Duration = Duration::from_millis(1);
/// How often a queue that goes asks.
const DROP_TRIES: usize = 100;

/// A stream of copies. Dropping it waits for what is under way.
#[derive(Debug)]
pub struct CopyQueue {
    context: Context,
    kernels: Kernels,
    stream: Stream,
    /// Dropped only when nothing reads it any more.
    memory: ManuallyDrop<Memory>,
    /// In the order of the stream.
    under_way: VecDeque<UnderWay>,
    /// Events that wait for their next use.
    spare: Vec<Event>,
    ends: Ends,
    next: Ticket,
    /// Launches of the post that is made, each with the number of its job.
    launches: Vec<(usize, Launch)>,
    batch: BatchLists,
    /// When something was last heard of what is under way; never: the driver is asked at once.
    heard: Option<Instant>,
    /// Whether the stream takes it to raise the flag.
    writes: bool,
    /// Why there can be no more posts.
    broken: Option<Error>,
}

/// What the driver reads while posts are under way.
#[derive(Debug)]
struct Memory {
    tables: PostTables,
    /// `None` in a queue whose lanes never come twice.
    lanes: Option<LaneTables>,
    /// How many blocks of the launch that runs have come to its end; 0 between launches.
    arrived: DeviceBuffer,
    flag: Flag,
}

#[derive(Debug)]
struct UnderWay {
    ticket: Ticket,
    /// Whether it raises the flag when it is over.
    tells: bool,
    /// `None` where the driver gave none: then the stream itself is asked.
    passed: Option<Event>,
    /// What to give back of the ring.
    end: Option<u64>,
    /// Where in the ring the sums come to lie, and how many.
    sums: Option<(usize, usize)>,
    failed: Option<Error>,
}

/// How the end of a post is told, as far as its copies are asked for.
#[derive(Clone, Copy, Debug)]
enum Told {
    ByLaunch,
    NotYet,
}

impl CopyQueue {
    /// Makes a queue.
    ///
    /// # Errors
    /// `Device` when there is no room for its tables.
    pub fn new(kernels: &Kernels) -> Result<Self> {
        let context = kernels.context();
        Self::make(kernels, PostTables::new(context)?, Some(LaneTables::new(context)?))
    }

    /// Makes a queue for copies that have little in common, whose tables have so many bytes for good: larger ones are refused
    /// ([`holds`](Self::holds)). With a page for the flag that is all that it pins.
    ///
    /// # Errors
    /// As [`CopyQueue::new`].
    pub(super) fn small(kernels: &Kernels, tables: usize) -> Result<Self> {
        Self::make(kernels, PostTables::fixed(kernels.context(), tables)?, None)
    }

    fn make(kernels: &Kernels, tables: PostTables, lanes: Option<LaneTables>) -> Result<Self> {
        let context = kernels.context().clone();
        let stream = Stream::new(&context)?;
        let arrived = DeviceBuffer::new(&context, size_of::<u32>())?;
        arrived.fill(&stream, 0)?;
        Ok(Self {
            kernels: kernels.clone(),
            memory: ManuallyDrop::new(Memory {
                tables,
                lanes,
                arrived,
                flag: Flag::new(&context)?,
            }),
            under_way: VecDeque::new(),
            spare: Vec::new(),
            ends: Ends::default(),
            next: Ticket(0),
            launches: Vec::new(),
            batch: BatchLists::default(),
            heard: None,
            writes: true,
            broken: None,
            stream,
            context,
        })
    }

    /// Its stream: what a post must come after is for this to wait for.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Posts a copy, behind those that were posted before. `None`, and nothing happened, while the tables of earlier posts leave no
    /// room: again when one has passed.
    ///
    /// # Errors
    /// `Layout` as [`kernels::launches`], or when a table has fewer entries than the jobs have pages; `Capacity` for too large
    /// tables; `Device` when an earlier failure has left the queue unusable. Nothing was posted then: what fails later is told by [`CopyQueue::passed`].
    ///
    /// # Safety
    /// Until the post has passed: all pages of the jobs must be live memory that the device reaches, pages that are read must not be
    /// written, and pages that are written must not be used.
    pub unsafe fn post(&mut self, jobs: &Jobs, wishes: Wishes) -> Result<Option<Ticket>> {
        // SAFETY: as the caller promises.
        unsafe { self.post_with(jobs, wishes, u8::from(wishes.sums)) }
    }

    /// Posts a copy that adds up the checksums of what it reads, and behind it launches that read what lies at the destination then and add up
    /// the same: [`CopyQueue::take_sums`] has both.
    ///
    /// # Errors
    /// As [`CopyQueue::post`].
    ///
    /// # Safety
    /// As [`CopyQueue::post`].
    pub unsafe fn post_verified(&mut self, jobs: &Jobs, wishes: Wishes) -> Result<Option<Ticket>> {
        // SAFETY: as the caller promises.
        unsafe { self.post_with(jobs, Wishes { sums: true, ..wishes }, 2) }
    }

    /// Posts a copy of which each page has so many checksums.
    ///
    /// # Safety
    /// As [`CopyQueue::post`].
    unsafe fn post_with(&mut self, jobs: &Jobs, wishes: Wishes, page_sums: u8) -> Result<Option<Ticket>> {
        self.usable()?;
        check_tables(jobs)?;
        self.launches.clear();
        let facts = self.kernels.facts();
        kernels::each_of_jobs(&jobs.list, facts, wishes, page_sums > 1, |number, launch| {
            self.launches.push((number, launch));
        })?;
        let kept = self.memory.lanes.as_ref().filter(|_| jobs.lasting);
        let found = kept.and_then(|kept| kept.find(&jobs.list));
        let layout = Layout::of(jobs, found.is_some(), page_sums);
        let idle = self.under_way.is_empty();
        let mut taken = self.memory.tables.take(layout.total, idle)?;
        if taken.is_none() {
            self.reap()?;
            taken = self.memory.tables.take(layout.total, self.under_way.is_empty())?;
        }
        let Some(taken) = taken else {
            return Ok(None);
        };
        let mut kept = self.memory.lanes.as_mut().filter(|_| jobs.lasting);
        let lanes = found.or_else(|| kept.as_mut()?.add(&jobs.list));
        let base = taken.offset;
        let written = self.memory.tables.write(jobs, layout, base);
        let result = written.and_then(|()| {
            // SAFETY: as the caller promises.
            unsafe { self.enqueue(jobs, layout, base, (found, lanes)) }
        });
        if let (Err(_), None, Some(_), Some(kept)) = (&result, found, lanes, &mut self.memory.lanes) {
            kept.forget_newest();
        }
        let sums = (page_sums > 0).then_some((base + layout.sums, layout.num_sums()));
        Ok(Some(self.close(result, Some(taken.end), sums)))
    }

    /// Posts copies by the driver's batched call, some at a time, which keeps the device's multiprocessors out of it. What it reads need not be in pages;
    /// every run is a copy of its own, so they should be long.
    ///
    /// # Errors
    /// `Unsupported` when the driver has no such call; `Device` when an earlier failure has left the queue unusable. Nothing was posted then.
    ///
    /// # Safety
    /// Until the post has passed: both ends of all runs must be live memory that the driver reaches, what is read must not be written,
    /// what is written must not be used, and no two destinations may overlap.
    pub unsafe fn post_batch(&mut self, runs: &[Run]) -> Result<Ticket> {
        self.usable()?;
        self.batch.fill(runs);
        // SAFETY: as the caller promises.
        match unsafe { self.batch.ask(&self.stream) } {
            // Some of the copies may have been taken.
            Err(error) if error.kind() == ErrorKind::Device => Ok(self.close(Err(error), None, None)),
            outcome => outcome.map(|()| self.close(Ok(Told::NotYet), None, None)),
        }
    }

    /// Waits until a post has passed, however long the driver does not say so.
    ///
    /// # Errors
    /// As [`CopyQueue::passed`]: nothing of it is under way then either.
    pub fn wait(&mut self, ticket: Ticket) -> Result<()> {
        while !self.passed(ticket)? {
            if self.synchronize().is_err() {
                // What kind of failure it is, `passed` finds out.
                std::thread::sleep(RETRY);
            }
        }
        Ok(())
    }

    /// Waits for all that is under way. Of what has not told its end by then the driver is asked at the next look.
    ///
    /// # Errors
    /// `Device` when the driver fails, which says nothing of what is under way.
    pub(super) fn synchronize(&mut self) -> Result<()> {
        self.stream.synchronize()?;
        self.heard = None;
        Ok(())
    }

    /// What the posts have raised the flag to, as [`Ticket::flag`] says; nobody is asked.
    pub fn flag(&self) -> u64 {
        self.memory.flag.value()
    }

    /// Whether a post has passed, and with it all before it. The memory that it uses is the caller's again then.
    ///
    /// # Errors
    /// `Device` when the post failed, or the context is dead: nothing of it is under way any more. A driver that only refuses to tell, as during the
    /// capture of a graph, has not said that it passed.
    pub fn passed(&mut self, ticket: Ticket) -> Result<bool> {
        self.reap()?;
        if self.under_way.front().is_some_and(|front| front.ticket <= ticket) {
            return Ok(false);
        }
        self.ends.take_failure(ticket).map_or(Ok(true), Err)
    }

    /// The checksums of the pages of a post that wished for them and has passed; once. Of a verified post those of what was read, and behind them,
    /// as many, those of what was placed.
    pub fn take_sums(&mut self, ticket: Ticket) -> Option<Vec<u64>> {
        self.ends.take_sums(ticket)
    }

    /// Whether there may be room for the tables of these jobs, verified.
    pub(super) fn holds(&self, jobs: &Jobs) -> bool {
        self.memory.tables.may_hold(Layout::of(jobs, false, 2).total)
    }

    /// Posts that have not passed, as far as was looked.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Whether there can be no more posts: its context is dead.
    pub fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Whether nothing is under way, as far as was looked; or it never will be, in a dead context.
    pub fn is_settled(&self) -> bool {
        self.under_way.is_empty() || self.is_broken()
    }

    /// Bytes on the device for tables.
    pub fn memory_bytes(&self) -> usize {
        let lanes = self.memory.lanes.as_ref().map_or(0, LaneTables::memory_bytes);
        self.memory.tables.memory_bytes() + lanes + self.memory.arrived.len()
    }

    /// Takes note of what has passed.
    fn reap(&mut self) -> Result<()> {
        self.usable()?;
        let told = self.flag();
        let silent = self.heard.is_none_or(|heard| heard.elapsed() >= SILENCE);
        let before = self.under_way.len();
        while let Some(front) = self.under_way.front() {
            let passed = match &front.passed {
                _ if told >= front.ticket.flag() => Ok(true),
                _ if front.tells && !silent => Ok(false),
                Some(event) => event.passed(),
                None => self.stream.done(),
            };
            match passed {
                Ok(true) => {}
                Err(error) if is_dead(&error) => return Err(self.broken.insert(error).clone()),
                // However long it goes on so: whoever took that for an end would give memory away that the device may still write. Transfers end by
                // their deadlines; only their memory waits.
                Ok(false) | Err(_) => break,
            }
            let Some(UnderWay {
                ticket,
                passed,
                end,
                sums,
                failed,
                ..
            }) = self.under_way.pop_front()
            else {
                break;
            };
            self.spare.extend(passed);
            match (failed, sums) {
                (Some(error), _) => self.ends.failed(ticket, error),
                (None, Some((offset, count))) => self.ends.summed(ticket, self.memory.tables.sums(offset, count)?),
                (None, None) => {}
            }
            if let Some(end) = end {
                self.memory.tables.release(end);
            }
        }
        if silent || self.under_way.len() < before {
            self.heard = Some(Instant::now());
        }
        Ok(())
    }

    fn usable(&self) -> Result<()> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// Asks the stream for all of a post. `lanes` is where they were found, and where they will be once brought. The last launch raises the flag if
    /// nothing comes after it.
    ///
    /// # Safety
    /// As [`CopyQueue::post`].
    unsafe fn enqueue(
        &self,
        jobs: &Jobs,
        layout: Layout,
        base: usize,
        (found, lanes): (Option<u64>, Option<u64>),
    ) -> Result<Told> {
        let _entered = self.context.enter()?;
        let (ring, device) = (
            self.memory.tables.pinned_address() + base as u64,
            self.memory.tables.device_address(),
        );
        // Lanes that will last go to where they stay; all else to where the next post's tables will lie too.
        let mut first = 0;
        if let (None, Some(address)) = (found, lanes) {
            first = layout.lanes;
            // SAFETY: the piece of the ring is taken until the post has passed; the room is of the lane tables' own.
            unsafe { self.copy(address, ring, layout.lanes) }?;
        }
        // SAFETY: as above; what lay there is read by launches that come before this in the stream.
        unsafe { self.copy(device + first as u64, ring + first as u64, layout.total - first) }?;
        let lanes = lanes.unwrap_or(device);
        let at = |offset: Option<usize>| offset.map_or(0, |offset| device + offset as u64);
        let told = match self.launches.last() {
            Some(_) if layout.num_sums() == 0 => Told::ByLaunch,
            _ => Told::NotYet,
        };
        for (index, (number, launch)) in self.launches.iter().enumerate() {
            // Jobs are few.
            let lanes_before: u64 = jobs.list[..*number].iter().map(|job| job.lanes.len() as u64).sum();
            let last = index + 1 == self.launches.len();
            let (flag, flag_value) = match told {
                Told::ByLaunch if last => (self.memory.flag.address(), self.next.flag()),
                _ => (0, 0),
            };
            let mut view = View {
                lanes: lanes + (lanes_before + u64::from(launch.first_lane)) * size_of::<Lane>() as u64,
                src_pages: at(layout.src),
                dst_pages: at(layout.dst),
                sums: device + layout.sums_of(launch.entry) as u64,
                arrived: self.memory.arrived.address(),
                flag,
                flag_value,
                ..launch.view
            };
            let function = self.kernels.function(launch.entry);
            // SAFETY: the context is entered; the view points into our tables, which stay until the stream has passed, and to what the
            // caller vouches for.
            unsafe { function.launch_entered(&self.stream, Extent::of(launch), (&raw mut view).cast()) }?;
        }
        let bytes = layout.total - layout.sums;
        // SAFETY: the sums' places on both sides, as above.
        unsafe { self.copy(ring + layout.sums as u64, device + layout.sums as u64, bytes) }?;
        Ok(told)
    }

    /// Has the stream raise the flag for the post that is made; false where it does not.
    fn raise(&mut self) -> bool {
        if self.writes {
            let (word, value) = (self.memory.flag.address(), self.next.flag());
            // SAFETY: the queue's own word, which goes when the stream has been waited for, and which nothing but this stream writes.
            let asked = unsafe { self.stream.write_value(word, value) };
            // A driver that does not do it is not asked for it again.
            self.writes = asked.is_ok();
        }
        self.writes
    }

    /// Copies in the order of the stream, in the context that is entered.
    ///
    /// # Safety
    /// Both ranges must be live, and not used in a conflicting way, until the stream has passed.
    unsafe fn copy(&self, dst: u64, src: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as the caller promises.
        let status = unsafe { (self.context.functions().cuMemcpyAsync)(dst, src, bytes, self.stream.handle()) };
        self.context.driver().check("cuMemcpyAsync", status)
    }

    /// Puts the flag, unless a launch raises it, and an event behind what was asked. Behind what failed only the event: some of it may be under way.
    fn close(&mut self, asked: Result<Told>, end: Option<u64>, sums: Option<(usize, usize)>) -> Ticket {
        let tells = match asked {
            Ok(Told::ByLaunch) => true,
            Ok(Told::NotYet) => self.raise(),
            Err(_) => false,
        };
        let failed = asked.err();
        let event = self.spare.pop().map_or_else(|| Event::new(&self.context), Ok);
        let passed = event.and_then(|event| event.record(&self.stream).map(|()| event));
        let ticket = self.next;
        self.next = Ticket(ticket.0 + 1);
        if self.under_way.is_empty() {
            self.heard = Some(Instant::now());
        }
        self.under_way.push_back(UnderWay {
            ticket,
            tells,
            passed: passed.ok(),
            end,
            sums: sums.filter(|_| failed.is_none()),
            failed,
        });
        ticket
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        for _ in 0..DROP_TRIES {
            match self.stream.synchronize() {
                Err(error) if !is_dead(&error) => std::thread::sleep(RETRY),
                Ok(()) | Err(_) => {
                    // SAFETY: dropped here and nowhere else, and not used after.
                    unsafe { ManuallyDrop::drop(&mut self.memory) };
                    return;
                }
            }
        }
        // The driver does not say that nothing reads the tables: they stay.
    }
}
