//! `ucx`: lanes over whatever UCX reaches, RDMA above all.
//!
//! A lane is a pair of workers, one at each end, made for one pair of engines and for nothing else, each
//! owned by one thread. Beside it runs a side channel, one more stream of the session, on which the two ends
//! agree on the lane, exchange keys, and ask for payload; payload itself goes through UCX only. The end
//! of either is the end of the lane, and destroying the worker is its fence: UCX touches no memory
//! afterwards. What is allowed on a lane is decided in `pdkv_core::lane`; what is safe about UCX is the
//! affair of `pdkv-ucx`.

mod asks;
mod codec;
mod control;
mod desk;
mod devices;
mod door;
mod lane;
mod message;
mod owner;
mod puts;
mod runtime;
mod socket;
mod trial;
mod verdict;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::time::{Duration, Instant};

use pdkv_core::capability::Capability;
use pdkv_core::gpu_memory::GpuMemory;
use pdkv_core::id::PeerKey;
use pdkv_core::lane::{Carrier, Manner, OneSidedPolicy};
use pdkv_core::session::{Established, features};
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;

use super::{Link, Work};
use crate::dial::StreamDial;
use crate::lists::{Memories, Regions};
use crate::mover::contained;
use crate::remote::RemoteRegion;
use crate::shared::Shared;
pub(crate) use control::{Control, Lanes, refuse_lanes};
use devices::{Devices, Look, Subject, Trying, Way, subjects};
pub(crate) use lane::serve;
pub(crate) use runtime::{Runtime, unwanted};

/// How long connect() waits for a lane at most, where something else reaches the peer as well.
pub(crate) const LANE_WAIT: Duration = Duration::from_secs(5);

/// Lanes to one peer, one after the other: when one ends and the peer is still there, the next transfer
/// makes another.
pub(crate) struct UcxLink {
    /// Itself and its engine, for a try that is made while somebody only asks.
    me: Weak<Self>,
    shared: Weak<Shared>,
    key: PeerKey,
    dial: StreamDial,
    /// What carries memory of GPUs.
    devices: Arc<Devices>,
    state: Mutex<State>,
    /// Held while a lane is made, so that transfers that come together make one.
    making: Mutex<()>,
}

#[derive(Default)]
struct State {
    lane: Option<Arc<Control>>,
    /// What the first lane came out as. Later ones must be the same: transfers are planned for it.
    agreed: Option<(Capability, String)>,
    /// Why there is no lane, when that came up, and whether it is worth another try.
    broken: Option<(String, Instant, bool)>,
    lost: bool,
}

/// When a lane that couldn't be made is tried again.
const AGAIN: Duration = Duration::from_secs(10);

impl UcxLink {
    /// A link without a lane yet, or why there can't be one.
    pub(crate) fn prepare(
        shared: &Arc<Shared>,
        established: &Established,
        key: PeerKey,
        dial: StreamDial,
    ) -> Result<Arc<Self>, String> {
        if let Some(reason) = unwanted(&shared.config) {
            return Err(reason);
        }
        if established.features & features::UCX == 0 {
            return Err("the peer's release has no lanes".to_owned());
        }
        Ok(Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            shared: Arc::downgrade(shared),
            key,
            dial,
            devices: Arc::default(),
            state: Mutex::default(),
            making: Mutex::default(),
        }))
    }

    /// Tries once more to make the first lane, without waiting for it.
    fn try_again(&self) {
        if let (Some(link), Some(shared)) = (self.me.upgrade(), self.shared.upgrade()) {
            link.open(&shared, Duration::ZERO, Vec::new());
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }

    /// Makes the first lane, tries it between our memory and these regions of the peer's where one is of a GPU, and waits for
    /// both, as long as `patience` at most. A lane that takes longer comes up later; until then, and when it fails,
    /// [`reaches`](Link::reaches) says why there is none.
    pub(crate) fn open(self: &Arc<Self>, shared: &Arc<Shared>, patience: Duration, regions: Vec<Arc<RemoteRegion>>) {
        let (told, over) = mpsc::channel();
        let (link, shared) = (Arc::clone(self), Arc::clone(shared));
        let movers = Arc::clone(&shared.movers);
        let task = move || {
            link.remember(contained(|| link.make(&shared).map(drop)).flatten());
            // Who is asked for the first time is told that it is being tried, which helps nobody who insists.
            let _ = link.carries(&shared.registry.memories(), &regions, true);
            // Whoever waited may have gone on without.
            let _ = told.send(());
        };
        if let Err(error) = movers.task(task) {
            return self.remember(Err(error));
        }
        let _ = over.recv_timeout(patience);
    }

    fn remember(&self, outcome: Result<()>) {
        let mut state = self.state();
        state.broken = match outcome {
            Ok(()) => None,
            _ if state.lost => return,
            Err(error) => {
                let lasting = matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Config);
                Some((reason_of(&error), Instant::now(), !lasting))
            }
        };
    }

    /// Makes a lane, unless one has come up meanwhile.
    fn make(&self, shared: &Arc<Shared>) -> Result<Arc<Control>> {
        // Nothing is behind it that a panic could leave halfway.
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let state = self.state();
            if state.lost {
                return Err(lost());
            }
            if let Some(lane) = state.lane.as_ref().filter(|lane| lane.takes_work()) {
                return Ok(Arc::clone(lane));
            }
        }
        let control = Control::new()?;
        shared.lanes.enter(self.key, &control)?;
        let (ready, made) = mpsc::channel();
        let dial = Arc::clone(&self.dial);
        lane::initiate(shared, &control, move || dial(), ready, &self.devices, |_, _| ())?;
        let agreed = made.recv_timeout(lane::SETUP).unwrap_or_else(|_| {
            let text = format!("no lane was made within {:?}", lane::SETUP);
            Err(Error::new(ErrorKind::PeerUnreachable, "lane", text))
        });
        let mut state = self.state();
        let outcome = agreed.and_then(|agreed| match &state.agreed {
            _ if state.lost => Err(lost()),
            Some((capability, _)) if *capability != agreed.capability => {
                let text = format!("a new lane came out as something else: {}", agreed.detail);
                Err(Error::new(ErrorKind::Unsupported, "lane", text))
            }
            _ => Ok((agreed.capability, agreed.detail)),
        });
        match outcome {
            Ok(agreed) => {
                state.agreed = Some(agreed);
                state.lane = Some(Arc::clone(&control));
                Ok(control)
            }
            Err(error) => {
                control.end();
                Err(error)
            }
        }
    }

    /// What carries memory of GPUs between these, the least of all there is; `None` where none is among them. What nobody knows yet
    /// is found out meanwhile, or first, if the caller `waits`.
    fn carries(&self, local: &[Memory], remote: &[Arc<RemoteRegion>], waits: bool) -> Result<Option<Way>, String> {
        let subjects = subjects(local, remote);
        if subjects.is_empty() {
            return Ok(None);
        }
        self.may_carry()?;
        let open: Vec<Subject> = subjects
            .iter()
            .filter(|subject| self.devices.look(subject.sides) == Look::Try)
            .cloned()
            .collect();
        if !open.is_empty() {
            let (over, ended) = mpsc::channel();
            // Whatever becomes of it, somebody is told or may try again.
            let trying = Trying {
                devices: Arc::clone(&self.devices),
                subjects: open,
                over,
            };
            let mut gpus = trying.subjects.iter().filter_map(|subject| subject.gpu.as_ref());
            gpus.try_for_each(pdkv_device::cuda::Gpu::may_see_arrivals)?;
            let (link, shared) = (self.me.upgrade(), self.shared.upgrade());
            let (link, shared) = link.zip(shared).ok_or("the engine is closed")?;
            if waits {
                link.find_out(&shared, trying, &ended);
            } else {
                let movers = Arc::clone(&shared.movers);
                let task = move || link.find_out(&shared, trying, &ended);
                movers.task(task).map_err(|error| error.message().to_owned())?;
            }
        }
        let mut found = Vec::new();
        for subject in &subjects {
            match self.devices.look(subject.sides) {
                Look::Goes(way) => found.push(way),
                Look::Stays(reason) => return Err(reason),
                // Whoever was to find out couldn't even begin.
                Look::Try => {
                    self.devices.give_up(subject.sides);
                    return Err("what carries memory of GPUs could not be tried".to_owned());
                }
            }
        }
        Ok(Some(verdict::worst(found)))
    }

    /// Whether its lane is one that could carry memory of GPUs at all.
    fn may_carry(&self) -> Result<(), String> {
        let shared = self.shared.upgrade().ok_or("the engine is closed")?;
        let agreed = self.state().agreed.clone();
        let (capability, detail) = agreed.ok_or("its lane is still being made")?;
        if !capability.one_sided {
            return Err(format!(
                "memory of GPUs goes by put and get only, and its lane is {detail}"
            ));
        }
        if !capability.rdma && shared.config.ucx.one_sided != OneSidedPolicy::Any {
            return Err(format!(
                "only an adapter reaches memory of GPUs, and its lane is {detail}"
            ));
        }
        Ok(())
    }

    /// Finds out what carries memory between these sides, on a lane of its own. Blocks, so on a thread of its own.
    fn find_out(&self, shared: &Arc<Shared>, trying: Trying, ended: &mpsc::Receiver<()>) {
        let sides: Vec<_> = trying.subjects.iter().map(|subject| subject.sides).collect();
        if let Err(error) = self.make_and_try(shared, trying, ended) {
            for sides in sides {
                self.devices.settle(sides, Err(error.clone()));
            }
        }
    }

    fn make_and_try(&self, shared: &Arc<Shared>, trying: Trying, ended: &mpsc::Receiver<()>) -> Result<()> {
        let control = Control::new()?;
        shared.lanes.enter(self.key, &control)?;
        let (ready, made) = mpsc::channel();
        let (dial, mine) = (Arc::clone(&self.dial), Arc::clone(&control));
        lane::initiate(
            shared,
            &control,
            move || dial(),
            ready,
            &self.devices,
            move |desk, made| {
                let settle = |sides, outcome| trying.devices.settle(sides, outcome);
                trial::run(desk, made, &trying.subjects, settle);
                mine.end();
            },
        )?;
        match made.recv_timeout(lane::SETUP) {
            Ok(agreed) => agreed.map(drop)?,
            Err(_) => control.end(),
        }
        // It goes with the last one that could say anything, at the latest when the lane ends.
        let _ = ended.recv();
        Ok(())
    }

    /// Makes a new lane for work that found none; blocks, so on a thread of its own.
    fn start_anew(&self, work: Arc<Work>) {
        let made = self.make(&work.shared);
        self.remember(made.as_ref().map(drop).map_err(Clone::clone));
        let refused = match made {
            Ok(lane) => lane.push(work).err().map(|work| (work, ended())),
            Err(error) => Some((work, error)),
        };
        if let Some((work, error)) = refused {
            work.fail(error);
            work.leave();
        }
    }
}

impl Link for UcxLink {
    fn capability(&self) -> Capability {
        let least = Capability::lane(Manner::ActiveMessages, Carrier::Emulated);
        let agreed = self.state().agreed.as_ref().map(|(capability, _)| *capability);
        let gpu = match self.may_carry() {
            Ok(()) => self.devices.gpu(),
            Err(_) => GpuMemory::Refused,
        };
        Capability {
            gpu,
            ..agreed.unwrap_or(least)
        }
    }

    fn capability_between(&self, local: &Memories, remote: &Regions) -> Capability {
        let known = subjects(local, remote);
        let ways: Vec<_> = known
            .iter()
            .filter_map(|subject| self.devices.way(subject.sides))
            .collect();
        if ways.is_empty() {
            return self.capability();
        }
        Capability::lane(Manner::OneSided, verdict::worst(ways).0).of_gpus()
    }

    fn detail(&self) -> String {
        let agreed = self.state().agreed.as_ref().map(|(_, detail)| detail.clone());
        let parts = agreed.into_iter().chain([self.devices.summary()]);
        parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ")
    }

    fn reaches(&self, local: &Memories, remote: &Regions) -> Result<(), String> {
        let mut state = self.state();
        let due = state
            .broken
            .as_ref()
            .is_some_and(|(_, since, again)| *again && since.elapsed() >= AGAIN);
        if due && !state.lost {
            state.broken = None;
            if state.agreed.is_none() {
                drop(state);
                self.try_again();
                return Err("its lane is being made once more".to_owned());
            }
        }
        match (&state.broken, &state.agreed) {
            (Some((reason, ..)), _) => Err(reason.clone()),
            (None, None) => Err("its lane is still being made".to_owned()),
            // One that has ended meanwhile is made anew by the next transfer.
            (None, Some(_)) => {
                drop(state);
                self.carries(local, remote, false).map(drop)
            }
        }
    }

    fn start(self: Arc<Self>, work: Arc<Work>) {
        work.employ(1);
        let lane = self.state().lane.clone();
        let work = match lane {
            Some(lane) => match lane.push(work) {
                Ok(()) => return,
                Err(work) => work,
            },
            None => work,
        };
        let (movers, mine) = (Arc::clone(&work.shared.movers), Arc::clone(&work));
        if let Err(error) = movers.task(move || self.start_anew(mine)) {
            work.fail(error);
            work.leave();
        }
    }

    fn ready_inline(&self, _work: &Work) -> bool {
        false
    }

    fn run_inline(self: Arc<Self>, work: &Arc<Work>) {
        self.start(Arc::clone(work));
    }

    fn shut_down(&self) {
        let mut state = self.state();
        state.lost = true;
        if let Some(lane) = state.lane.take() {
            lane.end();
        }
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::PeerLost, "lane", "the peer was lost meanwhile")
}

fn ended() -> Error {
    Error::new(ErrorKind::PeerLost, "lane", "the lane ended as soon as it was made")
}

/// An error as the reason against a transport.
fn reason_of(error: &Error) -> String {
    match error.hint() {
        Some(hint) => format!("{} ({hint})", error.message()),
        None => error.message().to_owned(),
    }
}

#[cfg(test)]
mod tests;
