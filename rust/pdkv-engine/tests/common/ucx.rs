//! UCX as tests find it, and lanes of either manner over transports of their choice.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pdkv_core::Result;
use pdkv_engine::{LinkInfo, OneSidedPolicy, Transfer, TransportKind, UcxConfig};

use super::{WAIT, Way};

/// How the engines of a test use UCX.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    /// What `UCX_TLS` would say.
    tls: &'static str,
    policy: OneSidedPolicy,
}

impl Lane {
    /// Put and get, however they are carried.
    pub(crate) const fn puts(tls: &'static str) -> Self {
        let policy = OneSidedPolicy::Any;
        Self { tls, policy }
    }

    /// Put and get if the kernel carries them. Releases before 1.16 don't say, so there it is messages.
    pub(crate) const fn kernel(tls: &'static str) -> Self {
        let policy = OneSidedPolicy::Kernel;
        Self { tls, policy }
    }

    pub(crate) const fn messages(tls: &'static str) -> Self {
        let policy = OneSidedPolicy::Never;
        Self { tls, policy }
    }

    /// Whether it is put and get for certain.
    pub(crate) fn is_direct(self) -> bool {
        self.policy == OneSidedPolicy::Any
    }

    /// Checks that the lane came out as this one says, over nothing but its transports.
    pub(crate) fn check(self, link: &LinkInfo) {
        let old = link.detail.contains("UCX 1.13");
        let manner = match self.policy {
            OneSidedPolicy::Any => "put/get over",
            OneSidedPolicy::Kernel if !old => "put/get over cma/memory",
            _ => "active messages over",
        };
        assert!(
            link.usable && link.detail.starts_with(manner),
            "{self:?}: {}",
            link.detail
        );
        let over = link.detail.split(", UCX").next().unwrap_or_default();
        for name in ["posix", "sysv", "cma", "tcp"] {
            let named = over.contains(&format!("{name}/"));
            assert!(
                !named || self.tls == "all" || self.tls.contains(name),
                "{self:?}: {over}"
            );
        }
    }
}

impl From<Lane> for Way {
    fn from(lane: Lane) -> Self {
        Self {
            lane: Some(lane),
            ..TransportKind::Ucx.into()
        }
    }
}

pub(crate) fn config(lane: Lane) -> UcxConfig {
    UcxConfig {
        library: if lane.tls.contains("cuda") {
            copy_for_gpus()
        } else {
            copies().into_iter().next()
        },
        one_sided: lane.policy,
        settings: vec![("TLS".to_owned(), lane.tls.to_owned())],
        ..UcxConfig::default()
    }
}

/// What comes of asking for a lane once it stands and was tried, for which a busy machine may need longer than connecting waits.
pub(crate) fn settled(ask: impl Fn() -> Result<Transfer>) -> Result<Transfer> {
    let started = Instant::now();
    loop {
        match ask() {
            Err(error) if error.message().contains("being made") || error.message().contains("being tried") => {
                assert!(started.elapsed() < WAIT.unwrap(), "{error}");
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return other,
        }
    }
}

/// The copies of UCX that the environment names for tests.
pub(crate) fn copies() -> Vec<PathBuf> {
    let listed = std::env::var("PDKV_TEST_UCX").unwrap_or_default();
    let named = listed.split(':').filter(|path| !path.is_empty()).map(PathBuf::from);
    let chosen = std::env::var("PDKV_UCX_LIBRARY").ok().map(PathBuf::from);
    chosen.into_iter().chain(named).collect()
}

/// A copy with a module for CUDA; says so when there is none.
pub(crate) fn copy_for_gpus() -> Option<PathBuf> {
    let has_cuda = |path: &PathBuf| {
        let beside = path
            .parent()
            .into_iter()
            .flat_map(|folder| [folder.join("ucx"), folder.to_owned()]);
        let names = beside.flat_map(std::fs::read_dir).flatten().flatten();
        names
            .into_iter()
            .any(|entry| entry.file_name().to_string_lossy().starts_with("libuct_cuda"))
    };
    let found = copies().into_iter().find(has_cuda);
    if found.is_none() {
        let required = std::env::var_os("PDKV_UCX_REQUIRED").is_some();
        assert!(!required, "no UCX with CUDA, and PDKV_UCX_REQUIRED is set");
        std::io::Write::write_all(&mut std::io::stderr(), b"skipped: no UCX with CUDA to test with\n").expect("stderr");
    }
    found
}

/// Whether this machine has a UCX to test with; says so when it hasn't.
pub(crate) fn is_here() -> bool {
    static HERE: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
        let search = pdkv_ucx::find::Search {
            explicit: copies().into_iter().next(),
            ..Default::default()
        };
        match pdkv_ucx::find::find(&search).0 {
            Ok(_) => true,
            Err(error) => {
                let required = std::env::var_os("PDKV_UCX_REQUIRED").is_some();
                assert!(!required, "UCX is required here: {error:?}");
                std::io::Write::write_all(
                    &mut std::io::stderr(),
                    format!("no UCX to test with: {error}\n").as_bytes(),
                )
                .expect("stderr");
                false
            }
        }
    });
    *HERE
}
