//! The knobs of the protocol engine: one owner each, a unit in the type, a default that ends.
//!
//! Every time here is finite: there is no "wait for ever" in pdkv.

use core::time::Duration;

use crate::error::{Error, ErrorKind, Result};

/// Longest lease an export can be given, by default.
pub const MAX_LEASE: Duration = Duration::from_secs(3600);

/// How one [`Node`](crate::node::Node) behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// How often an idle channel carries a ping. Costs one small message per peer each time.
    pub heartbeat: Duration,
    /// Silence after which a peer counts as lost. At least twice the heartbeat.
    pub peer_timeout: Duration,
    /// Lease of an export whose caller names none. Short, because renewals extend it.
    pub lease: Duration,
    /// Longest lease anyone can get, by the first grant or by renewal, counted from that moment. Who asks here for more is
    /// refused; a peer that asks for more is told how much it got.
    pub max_lease: Duration,
    /// Longest time one claim may keep an export pinned.
    pub max_claim: Duration,
    /// Most exports alive at once.
    pub max_exports: usize,
    /// Most transfers, and most claims, alive at once per peer.
    pub max_transfers_per_peer: usize,
    /// Longest time a claim waits for an export that is promised but not made. Only claims on caches of
    /// which an issuer was taken wait at all.
    pub early_claim: Duration,
    /// Most claims that wait so, of one peer. About a kilobyte each.
    pub max_early_claims_per_peer: usize,
    /// Most claims that wait so, of all peers, and most declines kept for exports that are not made.
    pub max_early_claims: usize,
    /// Ended exports remembered so that a late claim gets the true reason. 17 bytes each.
    pub max_tombstones: usize,
}

impl Default for NodeConfig {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(1),
            peer_timeout: Duration::from_secs(5),
            lease: Duration::from_secs(30),
            max_lease: MAX_LEASE,
            max_claim: Duration::from_secs(300),
            max_exports: 65_536,
            max_transfers_per_peer: 4096,
            early_claim: Duration::from_secs(10),
            max_early_claims_per_peer: 1024,
            max_early_claims: 8192,
            max_tombstones: 65_536,
        }
    }
}

impl NodeConfig {
    /// Checks the settings against each other.
    ///
    /// # Errors
    /// `Config` naming the setting and what it contradicts.
    pub fn validate(&self) -> Result<()> {
        let error = |text: String| Err(Error::new(ErrorKind::Config, "configure node", text));
        let times = [
            ("heartbeat", self.heartbeat),
            ("peer_timeout", self.peer_timeout),
            ("lease", self.lease),
            ("max_lease", self.max_lease),
            ("max_claim", self.max_claim),
            ("early_claim", self.early_claim),
        ];
        for (name, value) in times {
            if value < Duration::from_millis(1) || value > Duration::from_secs(366 * 86_400) {
                return error(format!(
                    "`{name}` is `{value:?}`, accepted are one millisecond to one year"
                ));
            }
        }
        let counts = [
            ("max_exports", self.max_exports),
            ("max_transfers_per_peer", self.max_transfers_per_peer),
            ("max_early_claims_per_peer", self.max_early_claims_per_peer),
            ("max_early_claims", self.max_early_claims),
            ("max_tombstones", self.max_tombstones),
        ];
        for (name, value) in counts {
            if value == 0 {
                return error(format!("`{name}` is `0`"));
            }
        }
        if self.peer_timeout < self.heartbeat * 2 {
            return error(format!(
                "`peer_timeout` is `{:?}`, less than two heartbeats of `{:?}`",
                self.peer_timeout, self.heartbeat
            ));
        }
        if self.lease > self.max_lease {
            return error(format!(
                "`lease` is `{:?}`, more than `max_lease` `{:?}`",
                self.lease, self.max_lease
            ));
        }
        Ok(())
    }

    /// Checks a lease that somebody here asks for.
    ///
    /// # Errors
    /// `Config` when it is longer than any may be.
    pub fn check_lease(&self, lease: Duration, operation: &'static str) -> Result<()> {
        if lease <= self.max_lease {
            return Ok(());
        }
        let text = format!("the lease is `{lease:?}`, longer than any may be");
        let hint = format!(
            "at most {:?}: renew it as long as the blocks are wanted",
            self.max_lease
        );
        Err(Error::new(ErrorKind::Config, operation, text).with_hint(hint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Spoil = fn(&mut NodeConfig);

    #[test]
    fn contradictions_name_the_setting() {
        NodeConfig::default().validate().expect("the default is valid");
        let cases: [(Spoil, &str); 4] = [
            (|c| c.heartbeat = Duration::ZERO, "`heartbeat`"),
            (|c| c.peer_timeout = c.heartbeat, "`peer_timeout`"),
            (|c| c.lease = c.max_lease * 2, "`lease`"),
            (|c| c.max_exports = 0, "`max_exports`"),
        ];
        for (spoil, name) in cases {
            let mut config = NodeConfig::default();
            spoil(&mut config);
            let error = config.validate().expect_err(name);
            assert!(
                error.kind() == ErrorKind::Config && error.message().starts_with(name),
                "{error}"
            );
        }
    }
}
