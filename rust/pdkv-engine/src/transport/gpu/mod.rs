//! `cuda`: pages of GPUs, copied by one launch that walks both block tables. The GPU of the side that runs the transfer does
//! it: between its own pages, those of a GPU beside it, those of a neighbour's process, which lends them by name over the local
//! socket, and memory of the host that is registered with the driver.

mod book;
mod desk;
mod opening;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use pdkv_core::capability::Capability;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_device::cuda::{DeviceMapping, Gpu, Reach};

use super::{Link, Work};
use crate::door::LocalDoor;
use crate::lists::{Memories, Regions};
use crate::mapping::map_again;
use crate::remote::RemoteRegion;
use crate::shared::Shared;
use crate::view::{ClaimedViews, lasts};
pub(crate) use book::Gpus;
use desk::{Desk, Order};
use opening::Thing;

/// What a GPU reaches of our memory and of the peer's, each by the program's numbers.
pub(crate) type Reached = [Arc<Vec<Reach>>; 2];

/// The way to one peer's memory for our GPUs, and to its GPUs' memory.
pub(crate) struct GpuLink {
    shared: Weak<Shared>,
    /// Who lends us memory; `None` for a peer in this very process.
    door: Option<LocalDoor>,
    /// Whether the peer has said that it has memory of a GPU.
    heard: AtomicBool,
}

impl GpuLink {
    /// # Errors
    /// Why this peer's memory can't be reached by any GPU.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        same_process: bool,
        door: &Result<LocalDoor, String>,
    ) -> Result<Arc<Self>, String> {
        if !same_process {
            door.as_ref().map_err(Clone::clone)?;
        }
        let door = door.as_ref().ok().filter(|_| !same_process).cloned();
        Ok(Arc::new(Self {
            shared: Arc::downgrade(shared),
            door,
            heard: AtomicBool::new(false),
        }))
    }

    /// Notes that the peer has memory of a GPU.
    pub(crate) fn hear(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    /// Has these regions, which were just advertised, mapped for every GPU that this engine uses. Blocks on the peer, unless told
    /// to stop.
    pub(crate) fn prefetch(&self, regions: &[Arc<RemoteRegion>], stopped: &dyn Fn() -> bool) {
        let Some(shared) = self.shared.upgrade() else { return };
        let lent: Vec<_> = regions.iter().filter(|region| region.device().is_some()).collect();
        if lent.is_empty() {
            return;
        }
        for desk in shared.gpus.desks() {
            // Who needs it tries again.
            let _ = self.borrow_all(desk.gpu(), &lent, stopped);
        }
    }

    /// Makes what the GPU copies between reachable for it. Blocks on the peer and on the driver.
    fn reach_all(&self, desk: &Desk, work: &Work) -> Result<Reached> {
        let gpu = desk.gpu();
        let near = |memory| work.shared.gpus.reach(gpu, &work.shared.registry, memory);
        let near: Vec<_> = work.local.iter().map(near).collect::<Result<_>>()?;
        let stopped = || work.stopped();
        let lent: Vec<_> = work.remote.iter().filter(|region| region.device().is_some()).collect();
        self.borrow_all(gpu, &lent, &stopped)?;
        let far = work.remote.iter().map(|region| self.see(gpu, region, work));
        let far: Vec<_> = far.collect::<Result<_>>()?;
        // For a process that has no memory of this GPU itself.
        if near.iter().chain(&far).any(is_host) {
            desk.measure();
        }
        Ok([Arc::new(near), Arc::new(far)])
    }

    /// What the GPU sees of a region; waits for its mapping, unless the transfer is to stop.
    fn see(&self, gpu: &Gpu, region: &Arc<RemoteRegion>, work: &Work) -> Result<Reach> {
        let stopped = || work.stopped();
        loop {
            if let Some(reach) = region.views.wait(gpu, &stopped)? {
                return Ok(reach);
            }
            if region.device().is_some() {
                // Whoever was about to borrow it has failed.
                self.borrow_all(gpu, &[region], &stopped)?;
                continue;
            }
            let claimed = ClaimedViews::of(gpu, [&**region]);
            if !claimed.regions().is_empty() {
                let mapped = region.mapped(self.door.as_ref(), &stopped);
                let outcome = mapped.and_then(|_| region.look(gpu));
                claimed.settle(region.id, &outcome);
                return outcome;
            }
        }
    }

    /// Asks the peer for the names of regions that this GPU does not see yet, and maps them. What can't be mapped and never
    /// will be is noted at the region.
    ///
    /// # Errors
    /// What kept it from those that may be had another time.
    fn borrow_all(&self, gpu: &Gpu, regions: &[&Arc<RemoteRegion>], stopped: &dyn Fn() -> bool) -> Result<()> {
        let open = ClaimedViews::of(gpu, regions.iter().map(|region| &***region));
        if open.regions().is_empty() {
            return Ok(());
        }
        let wanted: Vec<_> = open.regions().iter().map(|region| (region.id, region.len)).collect();
        let mut failure = None;
        let mut settle = |id, outcome: Result<Arc<DeviceMapping>>| {
            let outcome = outcome.map(Reach::Mapping);
            open.settle(id, &outcome);
            failure = failure.take().or(outcome.err().filter(|error| !lasts(error)));
        };
        let nothing = || Error::new(ErrorKind::Unsupported, "cuda", "the peer lent nothing");
        let asked = match &self.door {
            Some(door) => door.in_turn(stopped, || door.borrow(gpu, &wanted, stopped, &mut settle)),
            None => Err(nothing()),
        };
        let rest = asked.err().unwrap_or_else(nothing);
        for (id, _) in wanted {
            settle(id, Err(rest.clone()));
        }
        failure.map_or(Ok(()), Err)
    }

    /// Has the work done by the GPU's thread, which finds out where the memory is.
    fn order(self: Arc<Self>, desk: &Desk, work: Arc<Work>) {
        desk.order(Order { work, link: self });
    }

    /// Opens what has to be opened and asks who has to be asked, on a thread that may wait, and then has the work done.
    fn order_later(self: Arc<Self>, work: &Arc<Work>) {
        let mine = Arc::clone(work);
        let later = move || {
            let ready = desk_for(&mine).and_then(|desk| {
                // The GPU's thread takes them from there.
                let _ = mine.reaches.set(self.reach_all(&desk, &mine)?);
                Ok(desk)
            });
            match ready {
                Ok(desk) => self.order(&desk, mine),
                Err(error) => {
                    mine.fail(error);
                    mine.leave();
                }
            }
        };
        if let Err(error) = work.shared.movers.task(later) {
            work.fail(error);
            work.leave();
        }
    }
}

fn is_host(reach: &Reach) -> bool {
    matches!(reach, Reach::Host(_))
}

/// Whether nobody has to be asked for anything.
fn is_ready(desk: &Desk, work: &Work) -> bool {
    let gpu = desk.gpu();
    let near = |memory| work.shared.gpus.reaches_now(gpu, memory);
    (work.local.are_of(gpu) || work.local.iter().all(near)) && work.remote.are_ready(gpu)
}

/// What the GPU copies between as far as it is reachable, without asking anybody; `None` when somebody has to be.
fn reached(gpu: &Gpu, work: &Work) -> Option<Reached> {
    let near = |memory| work.shared.gpus.reached(gpu, memory);
    let near = work.local.iter().map(near).collect::<Option<_>>()?;
    let far = |region: &Arc<RemoteRegion>| region.views.now(gpu)?.ok();
    let far = work.remote.iter().map(far).collect::<Option<_>>()?;
    Some([Arc::new(near), Arc::new(far)])
}

/// The GPU that copies.
enum Copier {
    Open(Gpu),
    /// One that nobody in this process has opened yet.
    Closed(u32),
    /// The one of this name, if this process may see it: nobody here has started the driver, which alone knows.
    Unknown([u8; 16]),
}

/// The GPU of our memory, else the one of the peer's. Waits for nobody.
fn copier(local: &[Memory], remote: &[Arc<RemoteRegion>]) -> Result<Copier, String> {
    let ours = local
        .iter()
        .filter_map(Memory::device)
        .map(|region| region.gpu().clone());
    let theirs = remote.iter().filter_map(|region| region.gpu_here().cloned());
    if let Some(gpu) = ours.chain(theirs).next() {
        return Ok(Copier::Open(gpu));
    }
    let Some(device) = remote.iter().find_map(|region| region.device()) else {
        return Err(neither());
    };
    let told = |error: Error| error.message().to_owned();
    let Some(found) = Gpu::number_if_started(device.uuid).map_err(told)? else {
        return Ok(Copier::Unknown(device.uuid));
    };
    let ordinal = found.ok_or_else(unseen)?;
    let opened = Gpu::opened(ordinal).map_err(told)?;
    Ok(opened.map_or(Copier::Closed(ordinal), Copier::Open))
}

fn unseen() -> String {
    "the peer's GPU is none that this process may see".to_owned()
}

/// The desk of a GPU on which something can be launched, as far as is known.
fn usable(gpus: &Gpus, gpu: &Gpu) -> Result<Arc<Desk>, String> {
    let desk = gpus.desk(gpu).map_err(|error| error.message().to_owned())?;
    match desk.broken() {
        None => Ok(desk),
        Some(reason) => Err(format!("GPU `{}` can't be used: {reason}", gpu.ordinal())),
    }
}

/// The desk of the GPU that copies for this work. It is opened if need be, which takes its time.
fn desk_for(work: &Work) -> Result<Arc<Desk>> {
    let refuse = |reason| Error::new(ErrorKind::Unsupported, "cuda", reason);
    let gpus = &work.shared.gpus;
    let gpu = match copier(&work.local, &work.remote).map_err(refuse)? {
        Copier::Open(gpu) => gpu,
        Copier::Closed(ordinal) => gpus.openings.open(ordinal)?,
        Copier::Unknown(uuid) => {
            let found = gpus.openings.number_of(uuid)?;
            gpus.openings.open(found.ok_or_else(unseen).map_err(refuse)?)?
        }
    };
    usable(gpus, &gpu).map_err(refuse)
}

fn neither() -> String {
    "neither side is device memory".to_owned()
}

impl Link for GpuLink {
    fn capability(&self) -> Capability {
        Capability::device_copies()
    }

    fn detail(&self) -> String {
        match &self.door {
            None => "same process".to_owned(),
            Some(_) => "pages lent over the local socket".to_owned(),
        }
    }

    fn reaches(&self, local: &Memories, remote: &Regions) -> Result<(), String> {
        let shared = self.shared.upgrade().ok_or("the engine is closed")?;
        if local.is_empty() && remote.is_empty() {
            let any = self.heard.load(Ordering::Relaxed) || !shared.gpus.desks().is_empty();
            return any.then_some(()).ok_or_else(neither);
        }
        if let Some(door) = &self.door {
            map_again(door, &shared.movers, remote);
        }
        match copier(local, remote)? {
            Copier::Open(gpu) => {
                usable(&shared.gpus, &gpu)?;
                if !local.are_of(&gpu) {
                    let mut local = local.iter();
                    local.try_for_each(|memory| shared.gpus.may_reach(&gpu, memory))?;
                }
                remote.may_view(&gpu)
            }
            Copier::Closed(ordinal) => {
                shared.gpus.openings.may_open(Thing::Gpu(ordinal), &shared.movers)?;
                remote.iter().try_for_each(|region| region.may_be_seen())
            }
            Copier::Unknown(_) => {
                shared.gpus.openings.may_open(Thing::Driver, &shared.movers)?;
                remote.iter().try_for_each(|region| region.may_be_seen())
            }
        }
    }

    fn doubt(&self, local: &Memories, remote: &Regions) -> Option<String> {
        let unknown = matches!(copier(local, remote), Ok(Copier::Unknown(_)));
        unknown.then(|| "whether this process may see the peer's GPU is being found out".to_owned())
    }

    fn resolve(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.gpus.openings.start_beside(&shared.movers);
        }
    }

    fn start(self: Arc<Self>, work: Arc<Work>) {
        if work.program.total_bytes() == 0 {
            work.employ(1);
            return work.leave();
        }
        work.employ(1);
        if let Ok(Copier::Open(gpu)) = copier(&work.local, &work.remote)
            && let Some(desk) = work.shared.gpus.open_desk(&gpu)
            && is_ready(&desk, &work)
        {
            return self.order(&desk, work);
        }
        // The driver takes its time to open a GPU, to map and to register, and the peer to answer.
        self.order_later(&work);
    }

    fn ready_inline(&self, _work: &Work) -> bool {
        false
    }

    fn run_inline(self: Arc<Self>, work: &Arc<Work>) {
        self.start(Arc::clone(work));
    }

    fn orders_events(&self) -> bool {
        true
    }

    fn shut_down(&self) {
        // What is under way reads or writes pages that the driver keeps until it is over.
    }
}
