//! What goes over a link, between GPUs or to the host: how much of the GPU it takes, and that the way is measured once.

use std::time::Duration;

use pdkv_core::reference::Reference;
use pdkv_device::cuda::Gpu;
use pdkv_engine::{Engine, LocalSpan, Peer, PullOptions, RawOptions, Region, RemoteSpan, TransportKind};

use crate::common::child::Child;
use crate::common::standin::{Hold, count, is_here, is_here_with};
use crate::common::{Memory, WAIT, await_measurement, cache, engine, memory, table};
use crate::eventually;

const LEN: u64 = 4 << 20;

/// All of both.
fn spans(here: &Region, there: &Region) -> (LocalSpan, RemoteSpan) {
    let near = LocalSpan {
        region: here.id(),
        offset: 0,
        len: LEN,
    };
    let far = RemoteSpan {
        region: there.id(),
        offset: 0,
        len: LEN,
    };
    (near, far)
}

struct Ends {
    owner: Engine,
    reader: Engine,
    peer: Peer,
}

impl Ends {
    fn new() -> Self {
        let (owner, reader) = (
            engine("owner", &[TransportKind::Cuda]),
            engine("reader", &[TransportKind::Cuda]),
        );
        let peer = reader
            .connect(owner.address().unwrap(), Duration::from_secs(30))
            .unwrap();
        Self { owner, reader, peer }
    }

    /// Reads all of one memory into another, and looks at every byte.
    fn read(&self, theirs: Memory, ours: Memory) {
        let there = self.owner.register(memory(theirs, LEN), None, true).unwrap();
        let here = self.reader.register(memory(ours, LEN), None, true).unwrap();
        let bytes: Vec<u8> = (0..LEN).map(|at| (at * 31 + at / 251) as u8).collect();
        there.memory().write_at(0, &bytes).unwrap();
        for end in [&there, &here] {
            if let Some(region) = end.memory().device() {
                await_measurement(region.gpu());
            }
        }
        let (near, far) = spans(&here, &there);
        let transfer = self.peer.read(&[near], &[far], None, &RawOptions::default()).unwrap();
        transfer.wait(WAIT).unwrap();
        let mut got = vec![0; LEN as usize];
        here.memory().read_at(0, &mut got).unwrap();
        assert!(got == bytes, "{ours:?} from {theirs:?}");
    }
}

#[test]
fn what_goes_over_a_link_takes_no_more_of_the_gpu_than_fills_it() {
    // A GPU that has room for many blocks, and a driver without batches, so that a kernel copies.
    let settings = [
        ("PDKV_STANDIN_MULTIPROCESSORS", "32"),
        ("PDKV_STANDIN_VERSION", "12040"),
    ];
    if !is_here_with(
        "links::what_goes_over_a_link_takes_no_more_of_the_gpu_than_fills_it",
        &settings,
    ) {
        return;
    }
    let ends = Ends::new();
    for (theirs, ours, blocks) in [
        (Memory::Device, Memory::Malloc, 96),
        (Memory::Other, Memory::Device, 64),
        (Memory::Device, Memory::Private, 16),
        (Memory::Private, Memory::Device, 16),
    ] {
        // The first time it may be measured meanwhile.
        ends.read(theirs, ours);
        let before = count("blocks");
        ends.read(theirs, ours);
        assert_eq!(count("blocks") - before, blocks, "{ours:?} from {theirs:?}");
    }
}

#[test]
fn the_way_between_host_and_gpu_is_measured_once_beside_the_registration_and_nobody_waits_for_it() {
    const NAME: &str =
        "links::the_way_between_host_and_gpu_is_measured_once_beside_the_registration_and_nobody_waits_for_it";
    if !is_here(NAME) {
        return;
    }
    let ends = Ends::new();
    let (there, here) = (memory(Memory::Private, LEN), memory(Memory::Device, LEN));
    let held = Hold::kernels();
    let (say, said) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        // What is measured stands still.
        scope.spawn(|| say.send(ends.reader.register(here, None, true)));
        let here = said
            .recv_timeout(WAIT.unwrap())
            .expect("registration waits for nothing");
        let here = here.unwrap();
        eventually("the measurement has begun", || count("launches") == 1);
        let there = ends.owner.register(there, None, true).unwrap();
        let (near, far) = spans(&here, &there);
        let transfer = ends.peer.read(&[near], &[far], None, &RawOptions::default()).unwrap();
        eventually("a transfer goes by a kernel meanwhile", || count("launches") == 2);
        assert_eq!(count("calls cuMemcpyBatchAsync"), 0);
        drop(held);
        transfer.wait(WAIT).unwrap();
    });
    await_measurement(&Gpu::open(0).unwrap());
    let measured = || count("calls cuEventElapsedTime");
    let once = measured();
    assert!(once > 0);
    for (theirs, ours) in [(Memory::Device, Memory::Private), (Memory::Private, Memory::Device)] {
        ends.read(theirs, ours);
    }
    let other = Ends::new();
    other.read(Memory::Device, Memory::Private);
    assert_eq!(measured(), once);
}

#[test]
fn inside_a_gpu_the_bulk_engine_copies_where_it_was_measured_to_be_faster() {
    // The other kernel is slow, by the clock of the stand-in's GPU.
    let settings = [
        ("PDKV_STANDIN_SLOW", "copy_tiles"),
        // And no batches, so that a kernel copies whatever the way.
        ("PDKV_STANDIN_VERSION", "12040"),
    ];
    if !is_here_with(
        "links::inside_a_gpu_the_bulk_engine_copies_where_it_was_measured_to_be_faster",
        &settings,
    ) {
        return;
    }
    let ends = Ends::new();
    // Both GPUs are measured beside this.
    ends.read(Memory::Other, Memory::Device);
    let bulk = || count("launches pdkv2_copy_bulk");
    for (theirs, ours, launches) in [
        (Memory::Device, Memory::Malloc, 1),
        (Memory::Malloc, Memory::Device, 1),
        (Memory::Other, Memory::Device, 0),
        (Memory::Device, Memory::Private, 0),
        (Memory::Private, Memory::Device, 0),
    ] {
        let before = bulk();
        ends.read(theirs, ours);
        assert_eq!(bulk() - before, launches, "{ours:?} from {theirs:?}");
    }
}

#[test]
fn a_process_without_memory_of_the_gpu_has_the_way_measured_too() {
    if !is_here("links::a_process_without_memory_of_the_gpu_has_the_way_measured_too") {
        return;
    }
    let mut child = Child::start("processes::child", &[("PDKV_TEST_MEMORY", "malloc")]);
    let engine = engine("parent", &[TransportKind::Cuda]);
    let cache = cache(&engine, Memory::Private);
    engine.connect(&child.ask("address"), Duration::from_secs(30)).unwrap();
    assert_eq!(count("launches"), 0);
    let export = Reference::from_json(&child.ask("export 5")).unwrap();
    let pulled = cache.pull(&export, table(&[1]), &PullOptions::default()).unwrap();
    pulled.wait(WAIT).unwrap();
    eventually("the measurement", || count("calls cuEventElapsedTime") > 0);
}
