//! What an engine is asked to be. Every knob says its meaning, unit, default and cost; a bad value
//! refuses the start instead of being defaulted away.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

pub use pdkv_core::capability::TransportKind;
pub use pdkv_core::lane::OneSidedPolicy;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::cuda::least_staging_bytes;
pub use pdkv_ucx::Origin as UcxOrigin;

/// Settings of one engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Where to listen, `host:port`; port 0 lets the system choose. `None`: only connect.
    /// Default `127.0.0.1:0`.
    pub listen: Option<String>,
    /// Transports that may be used, best first. Default, `None`: all of them, and `ucx` only where this
    /// host has RDMA devices; named here, it is tried everywhere.
    pub transports: Option<Vec<TransportKind>>,
    /// Copy threads shared by all one-sided transfers. Default: half the cores, 1 to 4.
    pub threads: usize,
    /// Data streams of one transfer by tcp, one thread at each end of each. Default 2; all transfers from a peer share at most 64.
    pub tcp_streams: usize,
    /// Listen beyond loopback although nothing is encrypted or authenticated yet. Default false.
    pub insecure: bool,
    /// How often an idle control channel says it is alive. Default 1 s; costs one small message.
    pub heartbeat: Duration,
    /// Silence after which a peer counts as lost. Default 10 s; must exceed two heartbeats.
    pub peer_timeout: Duration,
    /// The longest a granted claim may pin an export: a peer's transfer that takes longer is ended. Default 120 s.
    pub max_claim: Duration,
    /// How long the progress thread polls after traffic before it sleeps, and how long a caller that
    /// waits for a transfer reads the answers itself. Default 100 µs; buys latency with CPU, and only
    /// while messages flow.
    pub spin: Duration,
    /// Settings of the `ucx` transport.
    pub ucx: UcxConfig,
    /// Pinned host memory for each GPU through which its memory goes where a transport carries host memory only, as tcp does.
    /// Half of it is to send from and half to receive into, the tables of the copies included. Default 64 MiB; it is taken in steps of 4 MiB, or of one half where
    /// that is less, as transfers need it, by one peer never all of it while there is more than one step. At least 32 pages, 128 KiB on most machines; 0 has such transfers refused.
    pub staging_bytes: u64,
    /// How long a peer may keep a step of that waiting, by not reading what is sent to it or not sending what it has begun, while others wait for
    /// one: then its transfer is ended. Default 30 s; must be more than 0.
    pub staging_patience: Duration,
    /// Reads back what our GPUs have copied and compares its checksums with those of what was read, before a transfer is over; wrong bytes end it with
    /// an `Integrity` error. For `cuda`, and for the copies to and from pinned memory by `tcp`. Default false; costs reading the destination once
    /// more, and has kernels copy where copy engines might.
    pub verify_copies: bool,
}

/// Settings of the `ucx` transport.
#[derive(Clone, Debug, Default)]
pub struct UcxConfig {
    /// The `libucp.so.0` to load and no other. Default: the first that is found in this process, on the
    /// system, or in an installed wheel.
    pub library: Option<PathBuf>,
    /// Folders of installed wheels to search when `library` is `None`, best first. Default: none.
    pub search: Vec<(UcxOrigin, PathBuf)>,
    /// On which carriers put and get may be used; both ends must allow it, else active messages are sent.
    /// Default: only on RDMA.
    pub one_sided: OneSidedPolicy,
    /// Settings of UCX itself without their `UCX_` prefix, for example `("TLS", "rc")`; they win over the
    /// environment. A name that the loaded UCX doesn't know is refused. Default: none.
    pub settings: Vec<(String, String)>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self {
            listen: Some("127.0.0.1:0".to_owned()),
            transports: None,
            threads: (cores / 2).clamp(1, 4),
            tcp_streams: 2,
            insecure: false,
            heartbeat: Duration::from_secs(1),
            peer_timeout: Duration::from_secs(10),
            max_claim: Duration::from_secs(120),
            spin: Duration::from_micros(100),
            ucx: UcxConfig::default(),
            staging_bytes: 64 << 20,
            staging_patience: Duration::from_secs(30),
            verify_copies: false,
        }
    }
}

impl EngineConfig {
    /// Checks every setting.
    ///
    /// # Errors
    /// `Config` naming the setting and the accepted values.
    pub fn validate(&self) -> Result<()> {
        let bad = |what: &str, hint: &str| Err(Error::new(ErrorKind::Config, "config", what).with_hint(hint));
        if self.transports.as_ref().is_some_and(Vec::is_empty) {
            return bad(
                "`transports` is empty",
                "name at least one of `inproc`, `cuda`, `shm`, `cma`, `tcp`, `ucx`",
            );
        }
        if !(1..=64).contains(&self.threads) {
            return bad(&format!("`threads` is `{}`", self.threads), "choose 1 to 64");
        }
        if !(1..=64).contains(&self.tcp_streams) {
            return bad(&format!("`tcp_streams` is `{}`", self.tcp_streams), "choose 1 to 64");
        }
        if self.heartbeat.is_zero() || self.peer_timeout < self.heartbeat * 2 {
            return bad(
                &format!(
                    "`peer_timeout` {:?} is under two heartbeats of {:?}",
                    self.peer_timeout, self.heartbeat
                ),
                "a peer may miss one heartbeat without being lost",
            );
        }
        // Half to send from, half to receive into.
        let least = 2 * least_staging_bytes();
        if self.staging_bytes != 0 && self.staging_bytes < least {
            return bad(
                &format!("`staging_bytes` is `{}`", self.staging_bytes),
                &format!("choose `{least}` or more, or 0 for none"),
            );
        }
        if self.staging_patience.is_zero() {
            return bad(
                "`staging_patience` is 0",
                "more than 0: every peer keeps a stage for a moment",
            );
        }
        if self.spin > Duration::from_millis(10) {
            return bad(
                &format!("`spin` is {:?}", self.spin),
                "at most 10 ms: it is CPU burnt while idle",
            );
        }
        Ok(())
    }

    /// The transports that may be used, best first.
    pub(crate) fn kinds(&self) -> &[TransportKind] {
        self.transports.as_deref().unwrap_or(TransportKind::ALL)
    }

    /// Whether the caller asked for a transport by name.
    pub(crate) fn names(&self, kind: TransportKind) -> bool {
        self.transports.as_ref().is_some_and(|kinds| kinds.contains(&kind))
    }

    /// Resolves `listen`, refusing anything beyond loopback unless `insecure` says so by name.
    pub(crate) fn listen_address(&self) -> Result<Option<SocketAddr>> {
        let Some(text) = &self.listen else { return Ok(None) };
        let address = resolve(text, "listen")?;
        if !address.ip().is_loopback() && !self.insecure {
            return Err(Error::new(
                ErrorKind::Config,
                "listen",
                format!("`{text}` is reachable from other hosts and the control channel is not encrypted"),
            )
            .with_hint("listen on 127.0.0.1, or pass `insecure=True` on a network you trust"));
        }
        Ok(Some(address))
    }
}

/// Turns `host:port` into an address.
pub(crate) fn resolve(text: &str, operation: &'static str) -> Result<SocketAddr> {
    let mut found = text.to_socket_addrs().map_err(|error| {
        Error::new(
            ErrorKind::Config,
            operation,
            format!("`{text}` is not a usable `host:port`"),
        )
        .with_hint("write it like `127.0.0.1:7000` or `[::1]:7000`")
        .with_source(error)
    })?;
    found.next().ok_or_else(|| {
        Error::new(
            ErrorKind::PeerUnreachable,
            operation,
            format!("`{text}` resolves to no address"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_loopback_needs_the_word_insecure() {
        let mut config = EngineConfig {
            listen: Some("0.0.0.0:0".into()),
            ..EngineConfig::default()
        };
        assert_eq!(config.listen_address().unwrap_err().kind(), ErrorKind::Config);
        config.insecure = true;
        assert!(config.listen_address().unwrap().is_some());
    }

    #[test]
    fn bad_settings_are_named() {
        for (config, name) in [
            (
                EngineConfig {
                    threads: 0,
                    ..EngineConfig::default()
                },
                "threads",
            ),
            (
                EngineConfig {
                    tcp_streams: 65,
                    ..EngineConfig::default()
                },
                "tcp_streams",
            ),
            (
                EngineConfig {
                    transports: Some(vec![]),
                    ..EngineConfig::default()
                },
                "transports",
            ),
            (
                EngineConfig {
                    peer_timeout: Duration::from_millis(1),
                    ..EngineConfig::default()
                },
                "peer_timeout",
            ),
            (
                EngineConfig {
                    spin: Duration::from_secs(1),
                    ..EngineConfig::default()
                },
                "spin",
            ),
            (
                EngineConfig {
                    staging_bytes: 1,
                    ..EngineConfig::default()
                },
                "`staging_bytes` is `1`",
            ),
            (
                EngineConfig {
                    staging_bytes: 2 * least_staging_bytes() - 1,
                    ..EngineConfig::default()
                },
                "staging_bytes",
            ),
            (
                EngineConfig {
                    staging_patience: Duration::ZERO,
                    ..EngineConfig::default()
                },
                "staging_patience",
            ),
        ] {
            let error = config.validate().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.message().contains(name), "{error}");
        }
    }
}
