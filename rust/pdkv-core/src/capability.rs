//! What movers can do, as data, and the choice between them as a pure function that can explain
//! itself.
//!
//! A transport states a [`Capability`] once and an [`Offer`] per peer: usable or not, and why. The
//! chooser knows no transport by name; the caller's wish can.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};
use crate::gpu_memory::GpuMemory;
use crate::lane::{Carrier, Manner};

/// The transports of this release, in the order in which they are tried when costs are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum TransportKind {
    /// Both engines in one process.
    Inproc,
    /// Pages of GPUs, copied by a kernel on one of ours.
    Cuda,
    /// Regions in shared memory.
    Shm,
    /// Kernel copies between processes of one host.
    Cma,
    /// Sockets.
    Tcp,
    /// Whatever UCX reaches, RDMA above all.
    Ucx,
}

impl TransportKind {
    /// Every transport.
    pub const ALL: &'static [Self] = &[Self::Inproc, Self::Cuda, Self::Shm, Self::Cma, Self::Tcp, Self::Ucx];

    /// The name that users write and see.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Inproc => "inproc",
            Self::Cuda => "cuda",
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for TransportKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = Self::ALL.iter().copied().find(|kind| kind.as_str() == text);
        known.ok_or_else(|| unknown("transport", text, Self::ALL.iter().map(|kind| kind.as_str())))
    }
}

/// The refusal of a name, with the names there are.
pub(crate) fn unknown<'a>(what: &str, text: &str, names: impl Iterator<Item = &'a str>) -> Error {
    let names: Vec<_> = names.map(|name| format!("`{name}`")).collect();
    Error::new(
        ErrorKind::Config,
        "parse setting",
        format!("`{text}` is not a name of a {what}"),
    )
    .with_hint(format!("accepted are {}", names.join(", ")))
}

/// What one way to a peer can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Which transport.
    pub transport: TransportKind,
    /// The initiator moves the bytes alone and needs the owner's block table.
    pub one_sided: bool,
    /// No payload byte is copied in user space except from source to destination.
    pub direct: bool,
    /// The bytes go by remote direct memory access, without either host's processor.
    pub rdma: bool,
    /// How it moves memory of GPUs, whatever memory the rest is said of.
    pub gpu: GpuMemory,
    /// What moving costs, roughly: for choosing, not for predicting.
    pub cost: Cost,
}

impl Capability {
    /// Memory that both processes see: one copy by whoever runs the transfer.
    pub const fn mapped(transport: TransportKind) -> Self {
        Self {
            transport,
            one_sided: true,
            direct: true,
            rdma: false,
            gpu: GpuMemory::Refused,
            cost: Cost {
                call_ns: 200,
                run_ns: 20,
                bytes_per_us: 10_000,
            },
        }
    }

    /// One launch on a GPU, which walks both block tables; runs cost nothing of their own.
    pub const fn device_copies() -> Self {
        Self {
            gpu: GpuMemory::Direct,
            cost: Cost {
                call_ns: 20_000,
                run_ns: 1,
                bytes_per_us: 50_000,
            },
            ..Self::mapped(TransportKind::Cuda)
        }
    }

    /// Copies by the kernel between the pages of two processes.
    pub const fn kernel_copies() -> Self {
        Self {
            cost: Cost {
                call_ns: 1500,
                run_ns: 120,
                bytes_per_us: 5000,
            },
            ..Self::mapped(TransportKind::Cma)
        }
    }

    /// Sockets: both ends gather and scatter by their own tables.
    pub const fn sockets() -> Self {
        Self {
            one_sided: false,
            gpu: GpuMemory::Staged,
            cost: Cost {
                call_ns: 15_000,
                run_ns: 150,
                bytes_per_us: 1500,
            },
            ..Self::mapped(TransportKind::Tcp)
        }
    }

    /// A lane of `ucx`, as it was agreed on. Lanes over RDMA beat sockets and leave one host to the
    /// transports made for it; all others cost more than whatever else moves the same bytes.
    pub const fn lane(manner: Manner, carrier: Carrier) -> Self {
        let rdma = matches!(carrier, Carrier::Rdma);
        let one_sided = matches!(manner, Manner::OneSided);
        let (call_ns, run_ns, bytes_per_us) = match (manner, carrier) {
            (Manner::OneSided, Carrier::Rdma) => (4000, 300, 5000),
            (Manner::OneSided, Carrier::Kernel) => (4000, 700, 4000),
            (Manner::OneSided, Carrier::Emulated) => (30_000, 1500, 1200),
            (Manner::ActiveMessages, _) => (40_000, 200, 1200),
        };
        Self {
            transport: TransportKind::Ucx,
            one_sided,
            direct: one_sided && !matches!(carrier, Carrier::Emulated),
            rdma,
            // Messages gather and scatter where a processor reaches; what else carries it is tried.
            gpu: if one_sided {
                GpuMemory::Untried
            } else {
                GpuMemory::Refused
            },
            cost: Cost {
                call_ns,
                run_ns,
                bytes_per_us,
            },
        }
    }

    /// The same between a GPU and whatever it is: to wait for its events, and to have it see what has arrived, takes a while. One host is left to
    /// `cuda` by that.
    #[must_use]
    pub const fn of_gpus(self) -> Self {
        let gpu = GpuMemory::moved(self.direct);
        Self { gpu, ..self }.and_before(17_000)
    }

    /// The same with every byte resting in memory of the host on its way, where a GPU's copies put it or take it from.
    #[must_use]
    pub const fn staged(self) -> Self {
        let staged = Self {
            direct: false,
            gpu: GpuMemory::Staged,
            ..self
        };
        staged.and_before(30_000)
    }

    const fn and_before(self, call_ns: u64) -> Self {
        Self {
            cost: Cost {
                call_ns: self.cost.call_ns + call_ns,
                ..self.cost
            },
            ..self
        }
    }
}

/// A linear cost model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cost {
    /// Nanoseconds to start one transfer.
    pub call_ns: u64,
    /// Nanoseconds for each contiguous run.
    pub run_ns: u64,
    /// Bytes in a microsecond.
    pub bytes_per_us: u64,
}

impl Cost {
    /// The estimate for a plan.
    pub fn estimate_ns(&self, bytes: u64, runs: u64) -> u64 {
        let moving = bytes.saturating_mul(1000) / self.bytes_per_us.max(1);
        let runs = runs.saturating_mul(self.run_ns);
        self.call_ns.saturating_add(runs).saturating_add(moving)
    }
}

/// One transport towards one peer, for one pair of memories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Which transport.
    pub transport: TransportKind,
    /// What it can do, or why it can't be used here.
    pub usable: Result<Capability, String>,
}

/// The only way a caller accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Require {
    /// This transport and no other.
    Transport(TransportKind),
    /// Any transport, as long as the bytes go by RDMA.
    Rdma,
}

impl Require {
    /// The name that users write.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Transport(kind) => kind.as_str(),
            Self::Rdma => "rdma",
        }
    }

    /// Why a way that could be used isn't what is required.
    fn against(self, capability: &Capability) -> Option<&'static str> {
        match self {
            Self::Transport(kind) => (kind != capability.transport).then_some("not the one required"),
            Self::Rdma => (!capability.rdma).then_some("not RDMA"),
        }
    }
}

impl From<TransportKind> for Require {
    fn from(kind: TransportKind) -> Self {
        Self::Transport(kind)
    }
}

impl FromStr for Require {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let names = || TransportKind::ALL.iter().map(|kind| kind.as_str());
        match text {
            "rdma" => Ok(Self::Rdma),
            _ => text
                .parse()
                .map(Self::Transport)
                .map_err(|_| unknown("way to require", text, names().chain(["rdma"]))),
        }
    }
}

/// What the caller insists on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// This and nothing else.
    pub require: Option<Require>,
    /// Nothing staged.
    pub require_direct: bool,
}

/// The transport to use and why the others are not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// What will be used.
    pub capability: Capability,
    /// One line for every transport looked at, the chosen one first.
    pub reasons: Vec<String>,
}

/// Picks the cheapest usable transport that meets the wish.
///
/// # Errors
/// `Unsupported` listing, for every transport, why it can't be used.
pub fn choose(offers: &[Offer], wish: Wish, bytes: u64, runs: u64) -> Result<Choice> {
    let mut usable = Vec::new();
    let mut reasons = Vec::new();
    for offer in offers {
        let name = offer.transport;
        match (&offer.usable, wish.require) {
            // What can't be used and isn't asked for either needs no long reason.
            (Err(_), Some(Require::Transport(wanted))) if wanted != name => {
                reasons.push(format!("{name}: not the one required"));
            }
            (Err(reason), _) => reasons.push(format!("{name}: {reason}")),
            (Ok(capability), require) => match require.and_then(|require| require.against(capability)) {
                Some(reason) => reasons.push(format!("{name}: {reason}")),
                None if wish.require_direct && !capability.direct => reasons.push(format!("{name}: not direct")),
                None => usable.push((capability.cost.estimate_ns(bytes, runs), *capability)),
            },
        }
    }
    usable.sort_by_key(|&(cost, capability)| (cost, capability.transport));
    let Some((&(cost, capability), dearer)) = usable.split_first() else {
        let wanted = match wish.require {
            None => "no transport is".to_owned(),
            Some(Require::Transport(kind)) => format!("`{kind}` is required and not"),
            Some(Require::Rdma) => "RDMA is required and not".to_owned(),
        };
        let text = format!("{wanted} usable: {}", reasons.join("; "));
        return Err(Error::new(ErrorKind::Unsupported, "choose transport", text)
            .with_hint("`pdkv doctor` tries each transport on this machine and says what it lacks"));
    };
    let mut all = vec![format!("{}: chosen, about {} us", capability.transport, cost / 1000)];
    all.extend(
        dearer
            .iter()
            .map(|(cost, other)| format!("{}: usable, about {} us", other.transport, cost / 1000)),
    );
    all.append(&mut reasons);
    Ok(Choice {
        capability,
        reasons: all,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offers(unusable: &[TransportKind]) -> Vec<Offer> {
        let ways = [
            Capability::mapped(TransportKind::Inproc),
            Capability::device_copies(),
            Capability::mapped(TransportKind::Shm),
            Capability::kernel_copies(),
            Capability::sockets(),
            Capability::lane(Manner::ActiveMessages, Carrier::Emulated),
        ];
        ways.map(|capability| Offer {
            transport: capability.transport,
            usable: if unusable.contains(&capability.transport) {
                Err("not here".to_owned())
            } else {
                Ok(capability)
            },
        })
        .to_vec()
    }

    #[test]
    fn the_cheapest_usable_transport_wins_and_all_are_explained() {
        use TransportKind::{Cma, Cuda, Inproc, Shm, Tcp, Ucx};
        for (unusable, expected) in [
            (&[Inproc][..], Cuda),
            (&[Inproc, Cuda], Shm),
            (&[Inproc, Cuda, Shm], Cma),
            (&[Inproc, Cuda, Shm, Cma], Tcp),
            (&[Inproc, Cuda, Shm, Cma, Tcp], Ucx),
        ] {
            let choice = choose(&offers(unusable), Wish::default(), 1 << 20, 64).expect("one is usable");
            assert_eq!(choice.capability.transport, expected);
            assert_eq!(choice.reasons.len(), TransportKind::ALL.len());
            assert!(choice.reasons[0].contains("chosen"));
        }
    }

    #[test]
    fn our_own_transports_beat_every_lane_without_rdma_and_rdma_beats_sockets() {
        let plain = [
            Capability::lane(Manner::OneSided, Carrier::Kernel),
            Capability::lane(Manner::OneSided, Carrier::Emulated),
            Capability::lane(Manner::ActiveMessages, Carrier::Rdma),
            Capability::lane(Manner::ActiveMessages, Carrier::Emulated),
        ];
        for (bytes, runs) in [(64, 1), (64 << 10, 1), (64 << 10, 16), (1 << 30, 1), (1 << 30, 1 << 18)] {
            let cost = |capability: Capability| capability.cost.estimate_ns(bytes, runs);
            assert!(cost(plain[0]) > cost(Capability::kernel_copies()), "{bytes} in {runs}");
            for lane in &plain[1..] {
                assert!(cost(*lane) > cost(Capability::sockets()), "{lane:?}: {bytes} in {runs}");
            }
            let rdma = Capability::lane(Manner::OneSided, Carrier::Rdma);
            assert!(cost(rdma) > cost(Capability::kernel_copies()), "{bytes} in {runs}");
            // Sockets gather many runs in one call, so only very small pieces are theirs.
            assert!(cost(rdma) < cost(Capability::sockets()) || bytes / runs < 512);
        }
    }

    #[test]
    fn memory_of_a_gpu_goes_by_cuda_then_by_rdma_then_staged_and_emulated_last() {
        let ways = [
            Capability::device_copies(),
            Capability::lane(Manner::OneSided, Carrier::Rdma).of_gpus(),
            Capability::sockets().staged(),
            Capability::lane(Manner::OneSided, Carrier::Emulated).of_gpus(),
        ];
        assert_eq!(ways.map(|way| way.direct), [true, true, false, false]);
        let (direct, staged) = (GpuMemory::Direct, GpuMemory::Staged);
        assert_eq!(ways.map(|way| way.gpu), [direct, direct, staged, staged]);
        for (bytes, runs) in [
            (1, 1),
            (64, 1),
            (64 << 10, 1),
            (64 << 10, 16),
            (1 << 30, 1),
            (1 << 30, 1 << 15),
        ] {
            let costs = ways.map(|way| way.cost.estimate_ns(bytes, runs));
            assert!(
                costs.is_sorted_by(|one, other| one < other),
                "{bytes} in {runs}: {costs:?}"
            );
        }
    }

    #[test]
    fn each_way_says_whether_memory_of_gpus_goes_by_it() {
        use GpuMemory::{Direct, Refused, Staged, Untried};
        let said = offers(&[]).into_iter().map(|offer| offer.usable.map(|way| way.gpu));
        let wanted = [Refused, Direct, Refused, Refused, Staged, Refused];
        assert_eq!(said.collect::<Vec<_>>(), wanted.map(Ok));
        assert_eq!(Capability::lane(Manner::OneSided, Carrier::Rdma).gpu, Untried);
    }

    #[test]
    fn a_wish_that_cannot_be_met_is_refused_with_the_reason() {
        let wish = Wish {
            require: Some(TransportKind::Shm.into()),
            require_direct: true,
        };
        let error = choose(&offers(&[TransportKind::Shm]), wish, 1, 1).expect_err("shm is not usable");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("`shm` is required and not usable"), "{error}");
        assert!(error.message().contains("shm: not here"), "{error}");
        assert!("carrier-pigeon".parse::<TransportKind>().is_err());
        assert_eq!("cma".parse::<TransportKind>().expect("a name"), TransportKind::Cma);
    }

    #[test]
    fn rdma_is_required_of_any_transport_and_refused_with_the_reason_of_each() {
        let wish = Wish {
            require: Some("rdma".parse().expect("a wish")),
            require_direct: false,
        };
        let mut ways = offers(&[TransportKind::Shm]);
        let error = choose(&ways, wish, 1, 1).expect_err("nothing here is RDMA");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        for reason in [
            "inproc: not RDMA",
            "shm: not here",
            "cma: not RDMA",
            "tcp: not RDMA",
            "ucx: not RDMA",
        ] {
            assert!(error.message().contains(reason), "{error}");
        }
        ways.pop();
        ways.push(Offer {
            transport: TransportKind::Ucx,
            usable: Ok(Capability::lane(Manner::OneSided, Carrier::Rdma)),
        });
        let choice = choose(&ways, wish, 1, 1).expect("one is RDMA");
        assert!(choice.capability.rdma && choice.capability.direct);
    }

    #[test]
    fn what_is_required_comes_back_from_its_name() {
        for kind in TransportKind::ALL {
            let require: Require = kind.as_str().parse().expect("a name");
            assert_eq!(require, Require::Transport(*kind));
            assert_eq!(require.as_str(), kind.as_str());
        }
        assert_eq!("rdma".parse::<Require>().expect("a name"), Require::Rdma);
        let error = "roce".parse::<Require>().expect_err("not a name");
        assert!(error.hint().is_some_and(|hint| hint.contains("`rdma`")), "{error:?}");
    }
}
