//! What only shows from inside: handles that are dropped, threads and descriptors that go.

mod codec;
mod ends;
mod lists;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_core::lane::OneSidedPolicy;
use pdkv_device::{HostRegion, HugePages};
use pdkv_ucx::find::{self, Search};

use crate::{Engine, EngineConfig, LocalSpan, Peer, RawOptions, Region, RemoteSpan, TransportKind, UcxConfig};

const WAIT: Option<Duration> = Some(Duration::from_secs(60));

/// The copy to test with; `None`, and a word about it, where there is none.
fn library() -> Option<std::path::PathBuf> {
    let listed = std::env::var("PDKV_TEST_UCX").unwrap_or_default();
    let explicit = listed.split(':').find(|path| !path.is_empty()).map(Into::into);
    let search = Search {
        explicit,
        ..Search::default()
    };
    match find::find(&search).0 {
        Ok(library) => Some(library.path().to_owned()),
        Err(error) => {
            let required = std::env::var_os("PDKV_UCX_REQUIRED").is_some();
            assert!(!required, "UCX is required here: {error:?}");
            None
        }
    }
}

fn engine(name: &str, library: &std::path::Path, puts: bool) -> Engine {
    let config = EngineConfig {
        transports: Some(vec![TransportKind::Ucx]),
        ucx: UcxConfig {
            library: Some(library.to_owned()),
            one_sided: if puts {
                OneSidedPolicy::Any
            } else {
                OneSidedPolicy::Never
            },
            settings: vec![("TLS".to_owned(), "tcp".to_owned())],
            ..UcxConfig::default()
        },
        ..EngineConfig::default()
    };
    Engine::new(name, config).unwrap()
}

fn region(engine: &Engine) -> Region {
    let memory = HostRegion::allocate(1 << 20, HugePages::Never).unwrap();
    engine.register(memory, None, true).unwrap()
}

fn read(peer: &Peer, into: &Region, from: &Region) -> pdkv_core::Result<()> {
    let len = 1 << 20;
    let dst = LocalSpan {
        region: into.id(),
        offset: 0,
        len,
    };
    let src = RemoteSpan {
        region: from.id(),
        offset: 0,
        len,
    };
    let transfer = peer.read(&[dst], &[src], None, &RawOptions::default())?;
    transfer.wait(WAIT)?;
    assert!(transfer.wait_quiesced(WAIT));
    Ok(())
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < WAIT.unwrap(), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn handles_go_with_their_regions_and_with_the_engine() {
    let Some(library) = library() else { return };
    for puts in [true, false] {
        let (owner, reader) = (engine("owner", &library, puts), engine("reader", &library, puts));
        let peer = reader
            .connect(owner.address().unwrap(), Duration::from_secs(30))
            .unwrap();
        let held = |engine: &Engine| engine.shared().ucx.held();
        assert_eq!(
            (held(&owner), held(&reader)),
            (0, 0),
            "nothing is registered before it is used"
        );
        let regions: Vec<_> = (0..3).map(|_| (region(&reader), region(&owner))).collect();
        for (into, from) in &regions {
            read(&peer, into, from).unwrap();
        }
        assert_eq!((held(&owner), held(&reader)), (3, 3));
        let alive = Arc::downgrade(regions[0].1.memory().host().unwrap());
        for (into, from) in regions {
            into.deregister().unwrap();
            from.deregister().unwrap();
        }
        assert_eq!((held(&owner), held(&reader)), (0, 0));
        eventually("the lender's memory is let go", || alive.upgrade().is_none());
        if puts {
            // Emulated puts reach whatever a key names, so the lane went first; the reader hears of it later.
            assert!(
                owner.shared().lanes.none(),
                "memory went before the lane that had lent it"
            );
            eventually("the lane is gone", || reader.shared().lanes.none());
        }
        let (into, from) = (region(&reader), region(&owner));
        read(&peer, &into, &from).unwrap();
        reader.close();
        assert_eq!(held(&reader), 0);
        assert!(reader.shared().lanes.none(), "closed before the lanes were gone");
    }
}

#[test]
fn a_lane_that_ends_is_made_anew_by_the_next_transfer() {
    let Some(library) = library() else { return };
    for puts in [true, false] {
        let (owner, reader) = (engine("owner", &library, puts), engine("reader", &library, puts));
        let peer = reader
            .connect(owner.address().unwrap(), Duration::from_secs(30))
            .unwrap();
        let (into, from) = (region(&reader), region(&owner));
        for round in 0..4 {
            from.memory().fill(0, 1 << 20, round + 1).unwrap();
            read(&peer, &into, &from).unwrap();
            let mut byte = [0];
            into.memory().read_at((1 << 20) - 1, &mut byte).unwrap();
            assert_eq!(byte, [round + 1]);
            // As if UCX had failed at either end; the peers themselves are well.
            let end = if round % 2 == 0 { &owner } else { &reader };
            end.shared().lanes.end_all();
            eventually("the lane is gone", || {
                owner.shared().lanes.none() && reader.shared().lanes.none()
            });
            assert!(peer.alive());
        }
    }
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn connections_that_come_and_go_leave_no_thread_and_no_descriptor() {
    let Some(library) = library() else { return };
    let (owner, reader) = (engine("owner", &library, false), engine("reader", &library, false));
    let (into, from) = (region(&reader), region(&owner));
    let round = || {
        let peer = reader
            .connect(owner.address().unwrap(), Duration::from_secs(30))
            .unwrap();
        read(&peer, &into, &from).unwrap();
        peer.close();
        eventually("the lanes are gone", || {
            owner.shared().lanes.none() && reader.shared().lanes.none()
        });
    };
    for _ in 0..20 {
        round();
    }
    let (fds, tasks) = (descriptors(), threads());
    for _ in 0..200 {
        round();
    }
    // Other tests of this process come and go too, so what counts is that nothing grows with the rounds.
    eventually("descriptors are left behind", || descriptors() < fds + 100);
    eventually("threads are left behind", || threads() < tasks + 100);
}
