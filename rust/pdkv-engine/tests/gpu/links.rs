//! What goes over a link, between GPUs or to the host: how much of the GPU it takes, and that the way is measured once.

use std::time::Duration;

use pdkv_engine::{Engine, LocalSpan, Peer, RawOptions, RemoteSpan, TransportKind};

use crate::common::standin::{count, is_here, is_here_with};
use crate::common::{Memory, WAIT, engine, memory};

const LEN: u64 = 4 << 20;

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
        let before = count("blocks");
        ends.read(theirs, ours);
        assert_eq!(count("blocks") - before, blocks, "{ours:?} from {theirs:?}");
    }
}

#[test]
fn the_way_between_host_and_gpu_is_measured_once_and_not_before_it_is_needed() {
    if !is_here("links::the_way_between_host_and_gpu_is_measured_once_and_not_before_it_is_needed") {
        return;
    }
    let measured = || count("calls cuEventElapsedTime");
    let ends = Ends::new();
    ends.read(Memory::Device, Memory::Malloc);
    assert_eq!(measured(), 0);
    ends.read(Memory::Private, Memory::Device);
    let once = measured();
    assert!(once > 0);
    for (theirs, ours) in [(Memory::Device, Memory::Private), (Memory::Private, Memory::Device)] {
        ends.read(theirs, ours);
    }
    let other = Ends::new();
    other.read(Memory::Device, Memory::Private);
    assert_eq!(measured(), once);
}
