//! Memory of GPUs on the lanes to one peer: between which sides it was tried, and what carries it there.
//!
//! What carries a copy of the host's memory says nothing about that of a GPU: an adapter may not reach it, and then UCX would emulate the copy.
//! So each pair of sides is tried once (`trial.rs`) before anything goes that way.

use std::collections::HashMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pdkv_core::capability::Capability;
use pdkv_core::gpu_memory::GpuMemory;
use pdkv_core::id::RegionId;
use pdkv_core::lane::{Carrier, Manner};
use pdkv_core::{ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_device::cuda::Gpu;

use super::verdict::worst;
use crate::remote::RemoteRegion;

/// When a try that failed by chance is made again.
const AGAIN: Duration = Duration::from_secs(10);

/// A GPU, by the name that it has in every process; `None` is the host.
type Place = Option<[u8; 16]>;

/// Where two memories lie: ours, and the peer's. At least one of them on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sides {
    here: Place,
    there: Place,
}

impl Sides {
    /// `None` for memory of two hosts.
    pub(super) fn of(local: &Memory, remote: &RemoteRegion) -> Option<Self> {
        Self::between(here(local), there(remote))
    }

    fn between(here: Place, there: Place) -> Option<Self> {
        (here.is_some() || there.is_some()).then_some(Self { here, there })
    }
}

fn here(memory: &Memory) -> Place {
    memory.device().map(|region| region.gpu().uuid())
}

fn there(region: &RemoteRegion) -> Place {
    let lent = region.device().map(|device| device.uuid);
    lent.or_else(|| region.gpu_here().map(Gpu::uuid))
}

/// What is to be tried: a copy between our side and a region on the other.
#[derive(Clone)]
pub(super) struct Subject {
    pub(super) sides: Sides,
    /// Our GPU; `None` for the host.
    pub(super) gpu: Option<Gpu>,
    pub(super) region: Arc<RemoteRegion>,
}

/// Every pair of sides among these memories, once.
pub(super) fn subjects(local: &[Memory], remote: &[Arc<RemoteRegion>]) -> Vec<Subject> {
    let ours = one_of_each(local, here);
    let theirs = one_of_each(remote, |region| there(region));
    let pairs = ours.iter().flat_map(|one| theirs.iter().map(move |other| (one, other)));
    let subject = |((here, memory), (there, region)): (&(Place, &Memory), &(Place, &Arc<RemoteRegion>))| {
        Some(Subject {
            sides: Sides::between(*here, *there)?,
            gpu: memory.device().map(|region| region.gpu().clone()),
            region: Arc::clone(region),
        })
    };
    pairs.filter_map(subject).collect()
}

fn one_of_each<T>(all: &[T], place: impl Fn(&T) -> Place) -> Vec<(Place, &T)> {
    let mut found: Vec<(Place, &T)> = Vec::new();
    for one in all {
        let place = place(one);
        if found.iter().all(|(known, _)| *known != place) {
            found.push((place, one));
        }
    }
    found
}

/// A region of each GPU among the peer's.
pub(super) fn gpus_of(remote: &[Arc<RemoteRegion>]) -> Vec<RegionId> {
    let found = one_of_each(remote, |region| there(region));
    let of_gpus = found.iter().filter(|(place, _)| place.is_some());
    of_gpus.map(|(_, region)| region.id).collect()
}

/// Makes what adapters have written into these memories visible to the GPUs, as far as they are memory of any.
///
/// # Errors
/// As [`Gpu::see_arrivals`].
pub(super) fn see_arrivals(memories: &[Memory]) -> Result<()> {
    let found = one_of_each(memories, here);
    let mut regions = found.iter().filter_map(|(_, memory)| memory.device());
    regions.try_for_each(|region| region.gpu().see_arrivals())
}

/// What carries memory of GPUs, and over what.
pub(super) type Way = (Carrier, String);

#[derive(Clone, Debug)]
enum Known {
    /// Somebody tries.
    Trying,
    Goes(Way),
    /// Why not, since when, and whether another try may say otherwise.
    Stays(String, Instant, bool),
}

/// What is known of a pair of sides.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    Goes(Way),
    Stays(String),
    /// Nobody has tried, and the caller is to: until it settles this, nobody else will.
    Try,
}

/// The duty to settle some pairs of sides: whatever becomes of it, they aren't said to be tried for ever.
pub(super) struct Trying {
    pub(super) devices: Arc<Devices>,
    pub(super) subjects: Vec<Subject>,
    /// Who waits for the end sees it when this goes.
    #[expect(dead_code, reason = "held for its drop")]
    pub(super) over: Sender<()>,
}

impl Drop for Trying {
    fn drop(&mut self) {
        for subject in &self.subjects {
            self.devices.give_up(subject.sides);
        }
    }
}

/// What is known of the lanes to one peer.
#[derive(Default)]
pub(super) struct Devices(Mutex<HashMap<Sides, Known>>);

impl Devices {
    fn with<T>(&self, look: impl FnOnce(&mut HashMap<Sides, Known>) -> T) -> T {
        look(&mut self.0.lock().expect("no holder panics"))
    }

    pub(super) fn look(&self, sides: Sides) -> Look {
        self.with(|known| match known.get(&sides) {
            Some(Known::Goes(way)) => Look::Goes(way.clone()),
            Some(Known::Trying) => Look::Stays("what carries memory of GPUs on its lanes is being tried".to_owned()),
            Some(Known::Stays(reason, since, again)) if !again || since.elapsed() < AGAIN => {
                Look::Stays(reason.clone())
            }
            _ => {
                known.insert(sides, Known::Trying);
                Look::Try
            }
        })
    }

    /// What carries it, if that is known.
    pub(super) fn way(&self, sides: Sides) -> Option<Way> {
        self.with(|known| match known.get(&sides) {
            Some(Known::Goes(way)) => Some(way.clone()),
            _ => None,
        })
    }

    /// How it goes at best, between any sides that were tried.
    pub(super) fn gpu(&self) -> GpuMemory {
        let found = self.with(|known| {
            let said = known.values().map(|known| match known {
                Known::Trying => GpuMemory::Untried,
                Known::Goes((carrier, _)) => Capability::lane(Manner::OneSided, *carrier).of_gpus().gpu,
                Known::Stays(..) => GpuMemory::Refused,
            });
            said.min()
        });
        found.unwrap_or(GpuMemory::Untried)
    }

    /// Whether a copy that is carried like this is no worse than the one that was tried: what was promised of it goes for this one.
    pub(super) fn confirms(&self, sides: Sides, carrier: Carrier) -> bool {
        let found = vec![(carrier, String::new())];
        self.way(sides)
            .is_some_and(|tried| worst([vec![tried.clone()], found].concat()).0 == tried.0)
    }

    pub(super) fn settle(&self, sides: Sides, outcome: Result<Way>) {
        let known = match outcome {
            Ok(way) => Known::Goes(way),
            Err(error) => {
                let lasting = matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Config);
                Known::Stays(super::reason_of(&error), Instant::now(), !lasting)
            }
        };
        self.with(|all| all.insert(sides, known));
    }

    /// Nobody tries any more, and nobody has settled this.
    pub(super) fn give_up(&self, sides: Sides) {
        self.with(|known| {
            if matches!(known.get(&sides), Some(Known::Trying)) {
                known.remove(&sides);
            }
        });
    }

    /// What was found, in a few words; empty as long as nothing was.
    pub(super) fn summary(&self) -> String {
        let mut ways: Vec<String> = self.with(|known| {
            let said = known.values().filter_map(|known| match known {
                Known::Trying => None,
                Known::Goes((_, over)) => Some(format!("memory of GPUs over {over}")),
                Known::Stays(reason, ..) => Some(format!("no memory of GPUs: {reason}")),
            });
            said.collect()
        });
        ways.sort();
        ways.dedup();
        ways.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use pdkv_core::Error;

    use super::*;

    const SIDES: Sides = Sides {
        here: Some([7; 16]),
        there: None,
    };

    #[test]
    fn a_pair_of_sides_is_tried_by_one_and_known_to_all() {
        let devices = Devices::default();
        assert_eq!(devices.look(SIDES), Look::Try);
        assert!(matches!(devices.look(SIDES), Look::Stays(reason) if reason.contains("being tried")));
        assert_eq!((devices.way(SIDES), devices.summary()), (None, String::new()));
        assert_eq!(devices.gpu(), GpuMemory::Untried, "while it is being tried");
        let way = (Carrier::Rdma, "rc_mlx5/mlx5_0:1".to_owned());
        devices.settle(SIDES, Ok(way.clone()));
        assert_eq!(devices.look(SIDES), Look::Goes(way.clone()));
        assert_eq!(devices.way(SIDES), Some(way));
        assert!(devices.confirms(SIDES, Carrier::Rdma));
        assert!(
            !devices.confirms(SIDES, Carrier::Emulated),
            "a piece that goes another way"
        );
        assert_eq!(devices.summary(), "memory of GPUs over rc_mlx5/mlx5_0:1");
        let other = Sides {
            here: None,
            there: Some([8; 16]),
        };
        assert_eq!(devices.look(other), Look::Try, "each pair for itself");
        assert!(!devices.confirms(other, Carrier::Rdma), "nothing was tried");
        devices.settle(other, Ok((Carrier::Emulated, "tcp/lo".to_owned())));
        assert!(devices.confirms(other, Carrier::Rdma) && devices.confirms(other, Carrier::Emulated));
        assert_eq!(devices.gpu(), GpuMemory::Direct, "at best");
        devices.settle(SIDES, Err(Error::new(ErrorKind::Unsupported, "lane", "no more")));
        assert_eq!(devices.gpu(), GpuMemory::Staged);
    }

    #[test]
    fn what_can_never_be_is_not_tried_again_and_what_failed_by_chance_is_later() {
        let devices = Devices::default();
        let fail = |kind| devices.settle(SIDES, Err(Error::new(kind, "lane", "no such thing")));
        fail(ErrorKind::Unsupported);
        let aged = |known: &mut HashMap<Sides, Known>| {
            if let Some(Known::Stays(_, since, _)) = known.get_mut(&SIDES) {
                *since = since.checked_sub(AGAIN).expect("a clock that has run for a while");
            }
        };
        devices.with(aged);
        assert_eq!(devices.look(SIDES), Look::Stays("no such thing".to_owned()));
        assert_eq!(devices.summary(), "no memory of GPUs: no such thing");
        assert_eq!(devices.gpu(), GpuMemory::Refused);
        fail(ErrorKind::PeerUnreachable);
        assert_eq!(devices.look(SIDES), Look::Stays("no such thing".to_owned()));
        devices.with(aged);
        assert_eq!(devices.look(SIDES), Look::Try);
    }
}
