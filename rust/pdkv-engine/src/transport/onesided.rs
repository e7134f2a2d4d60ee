//! `inproc`, `shm` and `cma`: the bytes are copied once, from source page to destination page, by
//! the side that runs the transfer; the peer's threads do nothing.
//!
//! A region is reached through a mapping where there is one and through the kernel's cross-memory
//! calls elsewhere: adopted memory has both, the whole pages inside by mapping, the edges by kernel.

use std::cell::RefCell;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pdkv_core::capability::{Capability, Require};
use pdkv_core::plan::CopyRun;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::{CmaBatch, CopyPipe, HostRegion, Process};

use super::work::Program;
use super::{Direction, Link, Work};
use crate::config::TransportKind;
use crate::door::LocalDoor;
use crate::lists::{Memories, Regions};
use crate::mapping::{Mapped, map_again, map_open};
use crate::mover::{Job, Movers, Step};
use crate::remote::RemoteRegion;
use crate::transfer::Path;

/// Lends the calling thread's span list.
fn with_batch<'a, T>(body: impl FnOnce(&mut CmaBatch<'a>) -> T) -> T {
    let mut batch = BATCH.take().recycle();
    let result = body(&mut batch);
    BATCH.set(batch.recycle());
    result
}

thread_local! {
    /// The span list of the kernel calls: one per thread, so that no transfer allocates it.
    static BATCH: RefCell<CmaBatch<'static>> = RefCell::new(CmaBatch::new());
}

/// Copies into or out of the memory of a process on this host.
pub(crate) struct OneSided {
    kind: TransportKind,
    path: Arc<Path>,
    /// The peer process, where the kernel lets us reach into it.
    process: Option<Arc<Process>>,
    /// Who hands out what can be mapped.
    door: Option<LocalDoor>,
    movers: Arc<Movers>,
}

impl OneSided {
    pub(crate) fn new(
        kind: TransportKind,
        detail: String,
        process: Option<Arc<Process>>,
        door: Option<LocalDoor>,
        movers: Arc<Movers>,
    ) -> Self {
        // For operations done inside the call, which weigh no alternatives.
        let reasons = vec![format!("{kind}: the best one-sided way to this peer")];
        Self {
            kind,
            path: Arc::new(Path {
                transport: kind,
                rdma: false,
                detail,
                reasons,
            }),
            process,
            door,
            movers,
        }
    }

    /// The path of operations done inside the call.
    pub(crate) fn path(&self) -> &Arc<Path> {
        &self.path
    }

    pub(crate) fn serves(&self, require: Require) -> bool {
        require == Require::Transport(self.kind)
    }

    /// Whether [`copy_one`](Self::copy_one) would not wait for a mapping.
    pub(crate) fn ready(&self, regions: &[Arc<RemoteRegion>]) -> bool {
        if regions.iter().any(|region| region.is_device()) {
            return false;
        }
        let within_reach = |region: &Arc<RemoteRegion>| {
            region.mapping.now().is_some() && (region.wholly_shared() || self.process.is_some())
        };
        self.kind == TransportKind::Cma || regions.iter().all(within_reach)
    }

    /// Copies one range between a local region and a remote one, right here.
    pub(crate) fn copy_one(
        &self,
        direction: Direction,
        local: (&HostRegion, u64),
        remote: (&RemoteRegion, u64),
        len: u64,
    ) -> Result<()> {
        if self.kind != TransportKind::Cma
            && let Some(mapped) = remote.0.mapping.now()
            && let Some(at) = mapped.locate(remote.1, len)
        {
            copy(direction, local, (mapped.memory.host()?, at), len)?;
            pdkv_device::copy_fence();
            return Ok(());
        }
        with_batch(|batch| {
            batch.push(local.0, local.1, remote_address(remote.0, remote.1, len)?, len)?;
            self.flush(direction, batch).map(drop)
        })
    }

    fn flush(&self, direction: Direction, batch: &mut CmaBatch<'_>) -> Result<u64> {
        let process = self.process.as_ref().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "cma",
                "the peer's private memory can't be reached from here",
            )
            .with_hint("the edges of adopted memory need ptrace rights; page-align the tensor or use tcp")
        })?;
        match direction {
            Direction::Read => batch.read(process),
            Direction::Write => batch.write(process),
        }
    }

    fn move_units<'a>(&self, work: &'a Work, units: Range<u64>, mapped: &'a [Option<Mapped>]) -> Result<u64> {
        with_batch(|batch| {
            let Program::Joint(plan) = &work.program else {
                return Err(Error::new(
                    ErrorKind::Internal,
                    "move",
                    "a one-sided link needs both sides' places",
                ));
            };
            let mut lanes = Lanes {
                batch,
                pipe: CopyPipe::new(),
            };
            let (mut bytes, mut runs) = (0, 0);
            let mut failure = None;
            let flow = plan.walk(units, |run| match self.move_run(work, mapped, &mut lanes, &run) {
                Ok(()) => {
                    bytes += run.len;
                    runs += 1;
                    if work.core.stop.load(Ordering::Relaxed) {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                }
                Err(error) => {
                    failure = Some(error);
                    ControlFlow::Break(())
                }
            });
            if let Some(error) = failure {
                return Err(error);
            }
            if flow.is_break() {
                return Err(Error::new(
                    ErrorKind::TransferCancelled,
                    "move",
                    "stopped before the last byte",
                ));
            }
            if !lanes.batch.is_empty() {
                self.flush(work.direction, lanes.batch)?;
            }
            lanes.pipe.finish()?;
            work.add_runs(runs);
            Ok(bytes)
        })
    }

    #[inline]
    fn move_run<'a>(
        &self,
        work: &'a Work,
        mapped: &'a [Option<Mapped>],
        lanes: &mut Lanes<'_, 'a>,
        run: &CopyRun,
    ) -> Result<()> {
        let (near, far) = match work.direction {
            Direction::Read => (run.dst, run.src),
            Direction::Write => (run.src, run.dst),
        };
        let local = work.local[near.region as usize].host()?;
        let region = &work.remote[far.region as usize];
        let Some(mapped) = &mapped[far.region as usize] else {
            return self.queue(
                work.direction,
                lanes.batch,
                local,
                near.offset,
                region,
                far.offset,
                run.len,
            );
        };
        if let Some(at) = mapped.locate(far.offset, run.len) {
            return lanes.copy(
                work.direction,
                (local, near.offset),
                (mapped.memory.host()?, at),
                run.len,
            );
        }
        // The run touches an edge outside the mapping: cut it in at most three.
        let inside_start = mapped.region_offset.clamp(far.offset, far.offset + run.len);
        let inside_end = (mapped.region_offset + mapped.memory.len()).clamp(inside_start, far.offset + run.len);
        for (start, end) in [(far.offset, inside_start), (inside_end, far.offset + run.len)] {
            if start < end {
                let near_offset = near.offset + (start - far.offset);
                self.queue(
                    work.direction,
                    lanes.batch,
                    local,
                    near_offset,
                    region,
                    start,
                    end - start,
                )?;
            }
        }
        if inside_start < inside_end {
            let near_offset = near.offset + (inside_start - far.offset);
            let at = inside_start - mapped.region_offset;
            lanes.copy(
                work.direction,
                (local, near_offset),
                (mapped.memory.host()?, at),
                inside_end - inside_start,
            )?;
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "both places of one span, spelled out")]
    fn queue<'a>(
        &self,
        direction: Direction,
        batch: &mut CmaBatch<'a>,
        local: &'a HostRegion,
        local_offset: u64,
        region: &RemoteRegion,
        region_offset: u64,
        len: u64,
    ) -> Result<()> {
        if batch.push(local, local_offset, remote_address(region, region_offset, len)?, len)? {
            self.flush(direction, batch)?;
        }
        Ok(())
    }

    /// The mappings of the peer's regions, made if they are wanted and nobody has. Blocks on the peer.
    fn mapped<'a>(&self, work: &'a Work) -> Result<&'a [Option<Mapped>]> {
        if self.kind == TransportKind::Cma {
            return work.mapped(|_| Ok(None));
        }
        let (door, stopped) = (self.door.as_ref(), || work.stopped());
        if !self.ready(&work.remote) {
            map_open(door, &work.remote, &stopped);
        }
        work.mapped(|region| region.mapped(door, &stopped).map(Some))
    }

    /// One turn of a copy thread.
    fn turn(&self, work: &Work, units: Range<u64>) {
        let moved = self
            .mapped(work)
            .and_then(|mapped| self.move_units(work, units, mapped));
        match moved {
            Ok(bytes) => work.add_bytes(bytes),
            Err(error) => work.fail(error),
        }
    }
}

/// The two ways a run can take within one turn of a thread.
struct Lanes<'b, 'a> {
    batch: &'b mut CmaBatch<'a>,
    pipe: CopyPipe<'a>,
}

impl<'a> Lanes<'_, 'a> {
    #[inline]
    fn copy(
        &mut self,
        direction: Direction,
        local: (&'a HostRegion, u64),
        far: (&'a HostRegion, u64),
        len: u64,
    ) -> Result<()> {
        let (dst, src) = if direction == Direction::Read {
            (local, far)
        } else {
            (far, local)
        };
        self.pipe.push(dst.0, dst.1, src.0, src.1, len)
    }
}

fn copy(direction: Direction, local: (&HostRegion, u64), far: (&HostRegion, u64), len: u64) -> Result<()> {
    match direction {
        Direction::Read => pdkv_device::copy(local.0, local.1, far.0, far.1, len),
        Direction::Write => pdkv_device::copy(far.0, far.1, local.0, local.1, len),
    }
}

/// Where a range of a peer's region lies in the peer, checked against the region's length.
fn remote_address(region: &RemoteRegion, offset: u64, len: u64) -> Result<u64> {
    let fits = offset.checked_add(len).is_some_and(|end| end <= region.len);
    region.address.checked_add(offset).filter(|_| fits).ok_or_else(|| {
        Error::new(
            ErrorKind::Region,
            "cma",
            format!(
                "range `{offset}` + `{len}` is outside region `{}` of `{}` bytes",
                region.id, region.len
            ),
        )
    })
}

impl Link for OneSided {
    fn capability(&self) -> Capability {
        match self.kind {
            TransportKind::Cma => Capability::kernel_copies(),
            kind => Capability::mapped(kind),
        }
    }

    fn detail(&self) -> String {
        self.path.detail.clone()
    }

    fn reaches(&self, local: &Memories, remote: &Regions) -> Result<(), String> {
        // None of its business, as its capability says, so nothing is looked at.
        if local.any_device() || remote.any_device() {
            return Ok(());
        }
        if let (TransportKind::Shm, Some(door)) = (self.kind, &self.door) {
            map_again(door, &self.movers, remote);
        }
        for region in remote.iter() {
            match self.kind {
                TransportKind::Inproc | TransportKind::Shm => {
                    region.mapping.expected()?;
                    if !region.wholly_shared() && self.process.is_none() {
                        return Err(format!(
                            "region `{}` has edges outside shared pages and the kernel grants no access to them",
                            region.id
                        ));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn start(self: Arc<Self>, work: Arc<Work>) {
        let hands = self
            .movers
            .threads()
            .min(usize::try_from(work.turns()).unwrap_or(usize::MAX))
            .max(1);
        work.employ(hands);
        let movers = Arc::clone(&self.movers);
        let ready = self.kind == TransportKind::Cma || self.ready(&work.remote);
        let shift = Arc::new(Shift { link: self, work });
        let job: Arc<dyn Job> = Arc::clone(&shift) as Arc<dyn Job>;
        if ready {
            movers.copy(&job, hands);
            return;
        }
        // A mapping may be a long time coming, and the copy threads have other peers' work to do.
        let (again, waiting, mine) = (Arc::clone(&movers), Arc::clone(&job), Arc::clone(&shift));
        let wait = move || {
            if let Err(error) = mine.link.mapped(&mine.work) {
                mine.work.fail(error);
            }
            again.copy(&waiting, hands);
        };
        if let Err(error) = movers.task(wait) {
            shift.work.fail(error);
            movers.copy(&job, hands);
        }
    }

    fn ready_inline(&self, work: &Work) -> bool {
        self.ready(&work.remote)
    }

    fn run_inline(self: Arc<Self>, work: &Arc<Work>) {
        work.employ(1);
        while let Some(units) = work.claim() {
            self.turn(work, units);
        }
        work.leave();
    }

    fn shut_down(&self) {
        // Nothing here blocks on the peer.
    }
}

/// The work of one transfer on the copy threads.
struct Shift {
    link: Arc<OneSided>,
    work: Arc<Work>,
}

impl Job for Shift {
    fn step(&self) -> Step {
        let Some(units) = self.work.claim() else {
            self.work.leave();
            return Step::Over;
        };
        self.link.turn(&self.work, units);
        Step::Again
    }
}
