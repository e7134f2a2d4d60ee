//! A peer that puts where nobody lent it anything: which transports of UCX let it, although the target's context
//! has no one-sided copies.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it found")]

mod common;

use std::time::{Duration, Instant};

use common::{bytes, lanes, library, memory, pattern};
use pdkv_ucx::{Context, Direction, ErrorMode, Features, InboxLimits, Library, Settings, Span, Tally, Worker};

const LEN: u64 = 64 << 10;

/// Puts into memory of a target whose context has messages only; says whether a byte of it changed.
fn written(library: &Library, tls: &str, len: u64) -> bool {
    let honest = Context::open(library, &lanes(tls), Features { one_sided: false }).unwrap();
    let hostile = Context::open(library, &lanes(tls), Features { one_sided: true }).unwrap();
    let (target, attacker) = (Worker::create(&honest).unwrap(), Worker::create(&hostile).unwrap());
    let _inbox = target.receive_messages(7, InboxLimits::default()).unwrap();
    let _back = target.connect(&attacker.address().unwrap(), ErrorMode::None).unwrap();
    let endpoint = attacker.connect(&target.address().unwrap(), ErrorMode::None).unwrap();
    let (secret, source) = (memory(&honest, LEN, 1), memory(&hostile, LEN, 2));
    // The key is the attacker's own: what the target would have to give it only matters to adapters.
    let key = endpoint
        .unpack(&source.pack().unwrap(), secret.region().address(), LEN)
        .unwrap();
    let tally = Tally::new(&attacker);
    let span = Span {
        local_offset: 0,
        remote_offset: 0,
        len,
    };
    let connected = Tally::new(&attacker);
    endpoint.flush(&connected).unwrap();
    let until = |over: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !over() && start.elapsed() < Duration::from_secs(2) {
            attacker.progress();
            target.progress();
        }
    };
    until(&|| connected.outstanding() == 0);
    let posted = endpoint.post(Direction::Put, &source, &key, &[span], &tally);
    until(&|| bytes(&secret, 0, LEN) != pattern(LEN, 1));
    let changed = bytes(&secret, 0, LEN) != pattern(LEN, 1);
    println!(
        "{tls} {len}: posted {:?}, failed {:?}, written {changed}, over {:?}",
        posted.map_err(|error| error.to_string()),
        tally.failure().map(|error| error.to_string()),
        endpoint.resources()
    );
    changed
}

/// Shared memory carries messages only, and what this context has no handler for is dropped.
#[test]
fn nobody_writes_over_shared_memory() {
    let Some(library) = library() else { return };
    for tls in ["posix", "sysv"] {
        for len in [8, LEN] {
            assert!(!written(&library, tls, len), "{tls} {len}");
        }
    }
}

/// Below UCP nothing asks what the target's context is for: UCX's TCP copies to the address in the packet, and the
/// kernel lets processes of one user write into each other. So lanes have no TCP unless the user names it.
#[test]
fn sockets_are_no_lane_unless_they_are_named() {
    let Some(library) = library() else { return };
    for tls in ["tcp", "posix,cma"] {
        written(&library, tls, LEN);
    }
    let sockets = |settings: Settings| {
        let context = Context::open(&library, &settings, Features::default()).unwrap();
        context.resources().iter().any(|resource| resource.transport == "tcp")
    };
    if std::env::var_os("UCX_TLS").is_none() {
        assert!(!sockets(Settings::default()));
    }
    assert!(sockets(lanes("tcp,self")));
}
