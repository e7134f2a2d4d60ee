//! What lanes of UCX do with memory of GPUs, and what they leave to others. UCX's own module for CUDA runs over the stand-in here; no adapter is at
//! hand that would reach a GPU, so what is carried is emulated, which only `one_sided` of `any` allows.

use std::sync::Arc;
use std::time::Duration;

use pdkv_core::{ErrorKind, Result};
use pdkv_engine::{
    Engine, EngineConfig, LocalSpan, Peer, RawOptions, Region, RemoteSpan, Transfer, TransportKind, UcxConfig,
};
use pdkv_ucx::find::{self, Search};
use pdkv_ucx::{Context, Features, Settings};

use crate::common::standin::{Hold, count, is_here_for_ucx};
use crate::common::ucx::{self, Lane, copy_for_gpus, settled};
use crate::common::{Memory, WAIT, memory};
use crate::eventually;
use crate::order::Writer;

pub(crate) const LEN: u64 = 300_000;
const FLUSHES: &str = "calls cuFlushGPUDirectRDMAWrites";
pub(crate) const PUTS: Lane = Lane::puts("tcp,cuda_copy");

fn is_here(test: &str, settings: &[(&str, &str)]) -> bool {
    copy_for_gpus().is_some() && is_here_for_ucx(&format!("lanes::{test}"), settings)
}

/// Two engines with this lane, and tcp.
pub(crate) struct Ends {
    pub(crate) owner: Engine,
    pub(crate) initiator: Engine,
}

impl Ends {
    pub(crate) fn new(lane: Lane) -> Self {
        let engine = |name| {
            let config = EngineConfig {
                transports: Some(vec![TransportKind::Ucx, TransportKind::Tcp]),
                ucx: UcxConfig {
                    library: copy_for_gpus(),
                    ..ucx::config(lane)
                },
                ..EngineConfig::default()
            };
            Engine::new(name, config).unwrap()
        };
        Self {
            owner: engine("owner"),
            initiator: engine("initiator"),
        }
    }

    pub(crate) fn register(&self, ours: Memory, theirs: Memory) -> (Region, Region) {
        let here = self.initiator.register(memory(ours, LEN), None, true).unwrap();
        let there = self.owner.register(memory(theirs, LEN), None, true).unwrap();
        (here, there)
    }

    fn connect(&self) -> Peer {
        let address = self.owner.address().unwrap();
        self.initiator.connect(address, Duration::from_secs(30)).unwrap()
    }
}

/// What is said of UCX's lane, usable or not.
fn detail(peer: &Peer) -> String {
    let links = peer.links();
    links
        .into_iter()
        .find(|link| link.transport == TransportKind::Ucx)
        .unwrap()
        .detail
}

fn read(peer: &Peer, near: LocalSpan, far: RemoteSpan) -> Result<Transfer> {
    settled(|| peer.read(&[near], &[far], None, &by_ucx()))
}

fn write(peer: &Peer, far: RemoteSpan, near: LocalSpan) -> Result<Transfer> {
    settled(|| peer.write(&[far], &[near], None, &by_ucx()))
}

pub(crate) fn spans(here: &Region, there: &Region) -> (LocalSpan, RemoteSpan) {
    let near = LocalSpan {
        region: here.id(),
        offset: 0,
        len: LEN,
    };
    let far = RemoteSpan {
        region: there.describe().region,
        offset: 0,
        len: LEN,
    };
    (near, far)
}

fn by_ucx() -> RawOptions {
    RawOptions {
        require: Some(TransportKind::Ucx.into()),
        ..RawOptions::default()
    }
}

pub(crate) fn pattern(seed: u64) -> Vec<u8> {
    (0..LEN).map(|at| (at * 31 + at / 251 + seed) as u8).collect()
}

fn holds(region: &Region, wanted: &[u8], what: &str) {
    let mut got = vec![0; wanted.len()];
    region.memory().read_at(0, &mut got).unwrap();
    assert!(got == wanted, "{what}");
}

#[test]
fn what_a_lane_may_not_carry_goes_by_tcp_and_the_reason_is_told() {
    if !is_here("what_a_lane_may_not_carry_goes_by_tcp_and_the_reason_is_told", &[]) {
        return;
    }
    for (lane, reason) in [
        (
            Lane::messages("tcp,cuda_copy"),
            "memory of GPUs goes by put and get only",
        ),
        (
            Lane::kernel("posix,cma,cuda_copy"),
            "only an adapter reaches memory of GPUs",
        ),
        (Lane::puts("tcp"), "has no transport here that knows memory of GPUs"),
    ] {
        let ends = Ends::new(lane);
        for (ours, theirs) in [
            (Memory::Device, Memory::Private),
            (Memory::Private, Memory::Malloc),
            (Memory::Device, Memory::Malloc),
        ] {
            let (here, there) = ends.register(ours, theirs);
            let peer = ends.connect();
            let (near, far) = spans(&here, &there);
            let error = read(&peer, near, far).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(
                error.message().contains(reason),
                "{lane:?} {ours:?} {theirs:?}: {error}"
            );
            there.memory().write_at(0, &pattern(3)).unwrap();
            let transfer = peer.read(&[near], &[far], None, &RawOptions::default()).unwrap();
            transfer.wait(WAIT).unwrap();
            holds(&here, &pattern(3), "by tcp");
            assert_eq!(
                (transfer.path().transport, transfer.stats().staged_bytes),
                (TransportKind::Tcp, LEN)
            );
            let told = transfer.path().reasons.join("\n");
            assert!(told.contains(reason), "{told}");
            // Memory of the host goes over the lane as ever.
            let (here, there) = ends.register(Memory::Private, Memory::Private);
            let (near, far) = spans(&here, &there);
            read(&peer, near, far).unwrap().wait(WAIT).unwrap();
            peer.close();
        }
    }
}

#[test]
fn what_has_arrived_is_seen_by_the_gpu_before_anybody_is_told() {
    for (ordering, flushes) in [("0", 1), ("100", 1), ("200", 0)] {
        // Each in a process of its own, which is told how the device keeps the order.
        if std::env::var("PDKV_STANDIN_ORDERING").is_ok_and(|told| told != ordering) {
            continue;
        }
        let settings = [("PDKV_STANDIN_ORDERING", ordering)];
        if !is_here("what_has_arrived_is_seen_by_the_gpu_before_anybody_is_told", &settings) {
            continue;
        }
        let ends = Ends::new(PUTS);
        let kinds = [Memory::Private, Memory::Device, Memory::Other];
        for (ours, theirs) in kinds.iter().flat_map(|ours| kinds.map(|theirs| (*ours, theirs))) {
            let (here, there) = ends.register(ours, theirs);
            let peer = ends.connect();
            let (near, far) = spans(&here, &there);
            let expect = |memory| if memory == Memory::Private { 0 } else { flushes };
            there.memory().write_at(0, &pattern(1)).unwrap();
            let before = count(FLUSHES);
            read(&peer, near, far).unwrap().wait(WAIT).unwrap();
            assert_eq!(count(FLUSHES) - before, expect(ours), "{ours:?} from {theirs:?}");
            holds(&here, &pattern(1), "read");
            here.memory().write_at(0, &pattern(2)).unwrap();
            let before = count(FLUSHES);
            let written = write(&peer, far, near).unwrap();
            written.wait(WAIT).unwrap();
            assert_eq!(count(FLUSHES) - before, expect(theirs), "{ours:?} into {theirs:?}");
            holds(&there, &pattern(2), "written");
            let detail = detail(&peer);
            let any = ours != Memory::Private || theirs != Memory::Private;
            assert_eq!(detail.contains("; memory of GPUs over tcp/"), any, "{detail}");
            peer.close();
        }
    }
}

#[test]
fn a_gpu_that_nobody_can_make_see_is_not_written_to() {
    if !is_here(
        "a_gpu_that_nobody_can_make_see_is_not_written_to",
        &[("PDKV_STANDIN_FLUSH", "0")],
    ) {
        return;
    }
    let ends = Ends::new(PUTS);
    for (ours, theirs) in [(Memory::Device, Memory::Private), (Memory::Private, Memory::Device)] {
        let (here, there) = ends.register(ours, theirs);
        let peer = ends.connect();
        let (near, far) = spans(&here, &there);
        let error = read(&peer, near, far).unwrap_err();
        assert!(error.message().contains("can't be made to see"), "{error}");
        peer.read(&[near], &[far], None, &RawOptions::default())
            .unwrap()
            .wait(WAIT)
            .unwrap();
    }
}

#[test]
fn a_lane_sends_what_the_stream_before_it_writes() {
    if !is_here("a_lane_sends_what_the_stream_before_it_writes", &[]) {
        return;
    }
    let ends = Ends::new(PUTS);
    let (here, there) = ends.register(Memory::Device, Memory::Malloc);
    let peer = ends.connect();
    let (near, far) = spans(&here, &there);
    // So that nothing but the event is left to wait for.
    write(&peer, far, near).unwrap().wait(WAIT).unwrap();
    let held = Hold::everything();
    let stream = Writer::into_memory(here.memory().address());
    let options = RawOptions {
        after: Some(Arc::clone(&stream.written)),
        ..by_ucx()
    };
    let transfer = peer.write(&[far], &[near], None, &options).unwrap();
    assert!(
        transfer.wait(Some(Duration::from_millis(20))).is_err(),
        "it did not wait"
    );
    drop(held);
    stream.stream.synchronize().unwrap();
    transfer.wait(WAIT).unwrap();
    holds(&there, &[9; 4096], "the bytes from before were sent");
}

#[test]
fn memory_of_a_gpu_goes_when_it_is_deregistered() {
    if !is_here("memory_of_a_gpu_goes_when_it_is_deregistered", &[]) {
        return;
    }
    let ends = Ends::new(PUTS);
    let (here, there) = ends.register(Memory::Device, Memory::Device);
    let peer = ends.connect();
    let (near, far) = spans(&here, &there);
    read(&peer, near, far).unwrap().wait(WAIT).unwrap();
    let kept = [&here, &there].map(|region| Arc::downgrade(region.memory().device().unwrap()));
    for region in [here, there] {
        region.deregister().unwrap();
    }
    for kept in kept {
        eventually("the memory is let go", || kept.upgrade().is_none());
    }
    // The lane went with what it had lent; what comes next makes another.
    let (here, there) = ends.register(Memory::Device, Memory::Device);
    there.memory().write_at(0, &pattern(5)).unwrap();
    let (near, far) = spans(&here, &there);
    read(&peer, near, far).unwrap().wait(WAIT).unwrap();
    holds(&here, &pattern(5), "over the next lane");
}

#[test]
fn ucx_lends_no_whole_allocation_of_a_gpu_unless_it_is_told_to() {
    if !is_here("ucx_lends_no_whole_allocation_of_a_gpu_unless_it_is_told_to", &[]) {
        return;
    }
    let search = Search {
        explicit: copy_for_gpus(),
        ..Search::default()
    };
    let library = find::find(&search).0.unwrap();
    let open = |settings| Context::open(&library, &settings, Features { one_sided: true }).unwrap();
    let has_it = |context: &Context| context.resources().iter().any(|found| found.transport == "cuda_ipc");
    let ours = open(Settings::default());
    assert!(ours.knows_gpus() && !has_it(&ours), "{:?}", ours.resources());
    let told = open(Settings::new([("TLS".to_owned(), "all".to_owned())]));
    assert!(has_it(&told), "{:?}", told.resources());
}
