//! What UCX's words about a probe amount to: what carries puts and gets on a lane. Decides, and touches nothing.

use pdkv_core::lane::Carrier;
use pdkv_ucx::{Link, Probe, Resource};

/// What carries a put, given what UCX says about one. What it says nothing about may be anything.
pub(super) fn carrier_of(probe: &Probe) -> Carrier {
    let all = |kind: Link| !probe.transports.is_empty() && probe.transports.iter().all(|lane| lane.link() == kind);
    match () {
        () if probe.emulated || !probe.certain => Carrier::Emulated,
        () if all(Link::Rdma) => Carrier::Rdma,
        () if all(Link::KernelCopy) => Carrier::Kernel,
        () => Carrier::Emulated,
    }
}

/// What is least of all to be trusted, and everything that was used.
pub(super) fn worst(found: Vec<(Carrier, String)>) -> (Carrier, String) {
    let (mut carrier, mut over) = (Carrier::Rdma, Vec::new());
    for (one, names) in found {
        carrier = match (carrier, one) {
            (Carrier::Emulated, _) | (_, Carrier::Emulated) => Carrier::Emulated,
            (Carrier::Kernel, _) | (_, Carrier::Kernel) => Carrier::Kernel,
            _ => Carrier::Rdma,
        };
        if !over.contains(&names) {
            over.push(names);
        }
    }
    (carrier, over.join(" and "))
}

/// The transports, for people.
pub(super) fn names(transports: &[Resource]) -> String {
    if transports.is_empty() {
        return "transports that UCX doesn't name".to_owned();
    }
    let names: Vec<_> = transports.iter().map(ToString::to_string).collect();
    names.join(" and ")
}

/// Whether lists are the transport's own: those that UCX takes apart again gain nothing. No machine without an
/// adapter has others, so unit tests take what there is.
pub(super) fn takes_lists(probe: &Probe) -> bool {
    probe.certain && (!probe.emulated || cfg!(test))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(emulated: bool, transports: &[&str], certain: bool) -> Probe {
        Probe {
            info: String::new(),
            certain,
            transports: transports.iter().map(|name| Resource::parse(name).unwrap()).collect(),
            emulated,
        }
    }

    #[test]
    fn the_worst_of_all_tries_counts() {
        let tries =
            |carriers: &[Carrier]| worst(carriers.iter().map(|&carrier| (carrier, carrier.to_string())).collect());
        let (carrier, over) = tries(&[Carrier::Rdma, Carrier::Rdma]);
        assert_eq!((carrier, over.as_str()), (Carrier::Rdma, "RDMA"));
        assert_eq!(tries(&[Carrier::Rdma, Carrier::Kernel]).0, Carrier::Kernel);
        assert_eq!(
            tries(&[Carrier::Rdma, Carrier::Emulated, Carrier::Kernel]).0,
            Carrier::Emulated
        );
    }

    #[test]
    fn only_adapters_are_rdma_and_only_the_kernel_is_the_kernel() {
        for (emulated, transports, carrier) in [
            (false, &["rc_mlx5/mlx5_0:1"][..], Carrier::Rdma),
            (false, &["rc_mlx5/mlx5_0:1", "rc_mlx5/mlx5_1:1"], Carrier::Rdma),
            (true, &["rc_mlx5/mlx5_0:1"], Carrier::Emulated),
            (false, &["rc_mlx5/mlx5_0:1", "tcp/eth0"], Carrier::Emulated),
            (false, &["cma/memory"], Carrier::Kernel),
            (false, &["posix/memory", "cma/memory"], Carrier::Emulated),
            (false, &["tcp/lo"], Carrier::Emulated),
            (false, &["newer/thing"], Carrier::Emulated),
            (false, &[], Carrier::Emulated),
        ] {
            assert_eq!(
                carrier_of(&probe(emulated, transports, true)),
                carrier,
                "{transports:?}"
            );
        }
        // Old releases name every lane of the connection and don't say which one it was.
        for transports in [&["rc_verbs/mlx5_0:1"][..], &["cma/memory"]] {
            assert_eq!(
                carrier_of(&probe(false, transports, false)),
                Carrier::Emulated,
                "{transports:?}"
            );
        }
    }
}
