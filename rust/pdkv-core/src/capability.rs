//! What movers can do, as data, and the choice between them as a pure function that can explain
//! itself.
//!
//! A transport states a [`Capability`] once and an [`Offer`] per peer: usable or not, and why. The
//! chooser knows no transport by name; the caller's wish can.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, ErrorKind, Result};

/// The transports of this release, in the order in which they are tried when costs are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum TransportKind {
    /// Both engines in one process.
    Inproc,
    /// Regions in shared memory.
    Shm,
    /// Kernel copies between processes of one host.
    Cma,
    /// Sockets.
    Tcp,
}

impl TransportKind {
    /// Every transport.
    pub const ALL: &'static [Self] = &[Self::Inproc, Self::Shm, Self::Cma, Self::Tcp];

    /// The name that users write and see.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Inproc => "inproc",
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Tcp => "tcp",
        }
    }

    /// What it can do.
    pub const fn capability(self) -> Capability {
        let same_host = Capability {
            transport: self,
            one_sided: true,
            direct: true,
            same_host: true,
            shared_memory_only: false,
            max_spans_per_call: u32::MAX,
            cost: Cost {
                call_ns: 200,
                run_ns: 20,
                bytes_per_us: 10_000,
            },
        };
        match self {
            Self::Inproc => same_host,
            Self::Shm => Capability {
                shared_memory_only: true,
                ..same_host
            },
            Self::Cma => Capability {
                max_spans_per_call: 1024,
                cost: Cost {
                    call_ns: 1500,
                    run_ns: 120,
                    bytes_per_us: 5000,
                },
                ..same_host
            },
            Self::Tcp => Capability {
                one_sided: false,
                same_host: false,
                max_spans_per_call: 1024,
                cost: Cost {
                    call_ns: 15_000,
                    run_ns: 150,
                    bytes_per_us: 1500,
                },
                ..same_host
            },
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
        Self::ALL
            .iter()
            .copied()
            .find(|kind| kind.as_str() == text)
            .ok_or_else(|| {
                let names: Vec<_> = Self::ALL.iter().map(|kind| format!("`{kind}`")).collect();
                Error::new(
                    ErrorKind::Config,
                    "parse transport",
                    format!("`{text}` is not a transport"),
                )
                .with_hint(format!("accepted are {}", names.join(", ")))
            })
    }
}

/// What a transport can do, whoever the peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own, not a state")]
pub struct Capability {
    /// Which transport.
    pub transport: TransportKind,
    /// The initiator moves the bytes alone and needs the owner's block table.
    pub one_sided: bool,
    /// No payload byte is copied in user space except from source to destination.
    pub direct: bool,
    /// Both ends must be on one host.
    pub same_host: bool,
    /// The owner's memory must be in a shared descriptor.
    pub shared_memory_only: bool,
    /// Most spans of one call into the kernel.
    pub max_spans_per_call: u32,
    /// What moving costs, roughly: for choosing, not for predicting.
    pub cost: Cost,
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
    /// What it can do.
    pub capability: Capability,
    /// `Err` says why it can't be used here.
    pub usable: Result<(), String>,
}

/// What the caller insists on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// This transport and no other.
    pub require: Option<TransportKind>,
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
        let capability = offer.capability;
        let name = capability.transport;
        match &offer.usable {
            _ if wish.require.is_some_and(|wanted| wanted != name) => {
                reasons.push(format!("{name}: not the one required"));
            }
            Err(reason) => reasons.push(format!("{name}: {reason}")),
            Ok(()) if wish.require_direct && !capability.direct => reasons.push(format!("{name}: not direct")),
            Ok(()) => usable.push((capability.cost.estimate_ns(bytes, runs), capability)),
        }
    }
    usable.sort_by_key(|&(cost, capability)| (cost, capability.transport));
    let Some((&(cost, capability), dearer)) = usable.split_first() else {
        let wanted = wish.require.map_or("no transport", |_| "the required transport is not");
        let text = format!("{wanted} usable: {}", reasons.join("; "));
        return Err(Error::new(ErrorKind::Unsupported, "choose transport", text)
            .with_hint("`peer.links` shows what each transport needs"));
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
        let offer = |&kind: &TransportKind| Offer {
            capability: kind.capability(),
            usable: if unusable.contains(&kind) {
                Err("not here".to_owned())
            } else {
                Ok(())
            },
        };
        TransportKind::ALL.iter().map(offer).collect()
    }

    #[test]
    fn the_cheapest_usable_transport_wins_and_all_are_explained() {
        use TransportKind::{Cma, Inproc, Shm, Tcp};
        for (unusable, expected) in [(&[Inproc][..], Shm), (&[Inproc, Shm], Cma), (&[Inproc, Shm, Cma], Tcp)] {
            let choice = choose(&offers(unusable), Wish::default(), 1 << 20, 64).expect("one is usable");
            assert_eq!(choice.capability.transport, expected);
            assert_eq!(choice.reasons.len(), 4);
            assert!(choice.reasons[0].contains("chosen"));
        }
    }

    #[test]
    fn a_wish_that_cannot_be_met_is_refused_with_the_reason() {
        let wish = Wish {
            require: Some(TransportKind::Shm),
            require_direct: true,
        };
        let error = choose(&offers(&[TransportKind::Shm]), wish, 1, 1).expect_err("shm is not usable");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.message().contains("shm: not here"), "{error}");
        assert!("carrier-pigeon".parse::<TransportKind>().is_err());
        assert_eq!("cma".parse::<TransportKind>().expect("a name"), TransportKind::Cma);
    }
}
