//! What may go over a lane of `ucx`, decided without UCX: which way the bytes go, given what carries them
//! and what both ends allow.
//!
//! Put and get of UCX are remote memory access only where hardware or the kernel checks them. Elsewhere
//! UCX emulates them: the receiver's library writes wherever a message tells it to. So one-sided lanes
//! need the consent of both ends, and who withholds it gets active messages, which the receiver places
//! by its own tables.

use std::fmt;
use std::str::FromStr;

use crate::capability::unknown;
use crate::error::{Error, Result};

/// Which way bytes go on a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Put and get between registered memory.
    OneSided,
    /// Messages that the receiver scatters by its own tables.
    ActiveMessages,
}

impl Manner {
    /// How it is called in the detail of a path.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OneSided => "put/get",
            Self::ActiveMessages => "active messages",
        }
    }
}

/// What carries the bytes of a put, as UCX itself reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// A network adapter, which checks every access against the registration.
    Rdma,
    /// The kernel of the host that both ends share, which checks every access against the mappings.
    Kernel,
    /// UCX at the other end, which checks nothing.
    Emulated,
}

impl Carrier {
    /// The name in messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rdma => "RDMA",
            Self::Kernel => "kernel copies",
            Self::Emulated => "emulation",
        }
    }
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// On which carriers an engine allows put and get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OneSidedPolicy {
    /// Only on RDMA.
    #[default]
    Rdma,
    /// Also where the kernel copies.
    Kernel,
    /// Also emulated, where the peer can write anywhere in this process: for trusted peers and tests.
    Any,
    /// Nowhere.
    Never,
}

impl OneSidedPolicy {
    const ALL: [Self; 4] = [Self::Rdma, Self::Kernel, Self::Any, Self::Never];

    /// The name that users write.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Kernel => "kernel",
            Self::Any => "any",
            Self::Never => "never",
        }
    }

    /// Whether put and get may go over this carrier.
    pub const fn allows(self, carrier: Carrier) -> bool {
        match self {
            Self::Never => false,
            Self::Any => true,
            Self::Kernel => !matches!(carrier, Carrier::Emulated),
            Self::Rdma => matches!(carrier, Carrier::Rdma),
        }
    }

    /// Whether it is worth finding out what carries a put at all: without adapters, only the policies
    /// that allow something else can come out one-sided.
    pub const fn worth_a_probe(self, adapters: bool) -> bool {
        match self {
            Self::Never => false,
            Self::Rdma => adapters,
            Self::Kernel | Self::Any => true,
        }
    }
}

impl FromStr for OneSidedPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|policy| policy.as_str() == text);
        known.ok_or_else(|| unknown("one-sided policy", text, Self::ALL.iter().map(|policy| policy.as_str())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_policy_allows_what_it_says() {
        use Carrier::{Emulated, Kernel, Rdma};
        for (policy, allowed) in [
            (OneSidedPolicy::Never, &[][..]),
            (OneSidedPolicy::Rdma, &[Rdma]),
            (OneSidedPolicy::Kernel, &[Rdma, Kernel]),
            (OneSidedPolicy::Any, &[Rdma, Kernel, Emulated]),
        ] {
            for carrier in [Rdma, Kernel, Emulated] {
                assert_eq!(
                    policy.allows(carrier),
                    allowed.contains(&carrier),
                    "{policy:?} {carrier}"
                );
            }
            // Never a probe that nothing could come of, and always one that something could.
            for adapters in [false, true] {
                let possible = [Kernel, Emulated].into_iter().chain(adapters.then_some(Rdma));
                let any = possible.into_iter().any(|carrier| policy.allows(carrier));
                assert_eq!(policy.worth_a_probe(adapters), any, "{policy:?} {adapters}");
            }
            assert_eq!(policy.as_str().parse::<OneSidedPolicy>().expect("a name"), policy);
        }
        let error = "yes".parse::<OneSidedPolicy>().expect_err("not a name");
        assert!(error.hint().is_some_and(|hint| hint.contains("`rdma`")));
    }
}
