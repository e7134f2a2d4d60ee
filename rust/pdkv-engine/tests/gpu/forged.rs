//! Owners that lend what they have not, over a door of their own.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_core::id::RegionId;
use pdkv_core::wire::{DeviceAdvert, Hello, HostFacts, RegionAdvert};
use pdkv_device::cuda::{Gpu, Handle};
use pdkv_engine::{LocalSpan, RawOptions, RemoteSpan, TransportKind};

use crate::common::fake::{door, hello_from_here, owner};
use crate::common::standin::is_here;
use crate::common::{Memory, WAIT, engine, memory};

const LEN: u64 = 4096;

/// What an owner answers the question for its region with.
type Answer = Vec<u8>;

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn extent(region_offset: u64, len: u64, offset: u64, allocation: u64, kind: u64, name: &[u8; 64]) -> Vec<u8> {
    [words(&[region_offset, len, offset, allocation, kind]), name.to_vec()].concat()
}

/// A hello of a neighbour with one region of a GPU, number 5, and a door of this name.
pub(crate) fn with_a_region(door: String, len: u64, movable: bool) -> Hello {
    let region = RegionAdvert {
        id: RegionId(5),
        len,
        base_address: RegionAdvert::NOWHERE,
        shared: None,
        raw_access: true,
        name: String::new(),
        device: Some(DeviceAdvert {
            uuid: Gpu::open(0).unwrap().uuid(),
            sealed: String::new(),
            movable,
        }),
    };
    let from_here = hello_from_here();
    Hello {
        host: HostFacts {
            local_socket: door,
            ..from_here.host.clone()
        },
        regions: vec![region],
        ..from_here
    }
}

/// Reads 4 KiB of a region of a fake owner's GPU, whose door gives this answer.
fn read(answer: Answer, fds: usize) -> pdkv_core::Error {
    let (listener, name) = door();
    std::thread::spawn(move || {
        loop {
            let Ok((stream, _)) = listener.accept() else { return };
            lend(stream, &answer, fds);
        }
    });
    let (address, script) = owner(
        with_a_region(name, LEN, false),
        |mut wire| while wire.receive().is_some() {},
    );
    let reader = engine("reader", &[TransportKind::Cuda]);
    let here = reader.register(memory(Memory::Device, LEN), None, true).unwrap();
    let peer = reader.connect(&address, Duration::from_secs(30)).unwrap();
    let (near, far) = (
        LocalSpan {
            region: here.id(),
            offset: 0,
            len: LEN,
        },
        RemoteSpan {
            region: RegionId(5),
            offset: 0,
            len: LEN,
        },
    );
    let started = peer.read(&[near], &[far], None, &RawOptions::default());
    let error = started.and_then(|transfer| transfer.wait(WAIT)).unwrap_err();
    let mut got = vec![1; LEN as usize];
    here.memory().read_at(0, &mut got).unwrap();
    assert!(got.iter().all(|&byte| byte == 0), "something was read");
    reader.close();
    script.join().unwrap();
    error
}

/// Answers whoever asks for regions; others only look who is there.
fn lend(mut stream: UnixStream, answer: &[u8], fds: usize) {
    let mut question = [0; 24 + 4 + 8];
    if stream.read_exact(&mut question).is_err() {
        return;
    }
    assert_eq!(question[4], 2, "memory of a GPU is asked for by its own question");
    if fds == 0 {
        let _ = stream.write_all(answer);
        return;
    }
    let _ = stream.write_all(&answer[..24]);
    let null = std::fs::File::open("/dev/null").unwrap();
    let all = vec![null.as_fd(); fds];
    let _ = pdkv_device::send_fds(stream.as_fd(), &all, &answer[24..], &AtomicBool::new(false));
}

#[test]
fn names_that_are_forged_map_nothing() {
    if !is_here("forged::names_that_are_forged_map_nothing") {
        return;
    }
    let real = memory(Memory::Malloc, LEN);
    let shared = real.device().unwrap().share().unwrap();
    let Handle::Ipc(own) = &shared[0].handle else {
        panic!("memory of cuMemAlloc is named by CUDA IPC")
    };
    let head = |count: u64| words(&[5, count, 0]);
    let whole = |name: &[u8; 64]| extent(0, LEN, 0, 2 << 20, 0, name);
    let cases: Vec<(&str, Answer, usize)> = vec![
        ("a name of nobody", [head(1), whole(&[0x5A; 64])].concat(), 0),
        ("our own memory's name", [head(1), whole(own)].concat(), 0),
        (
            "bytes past the allocation",
            [head(1), extent(0, LEN, u64::MAX - 8, 2 << 20, 0, own)].concat(),
            0,
        ),
        ("a gap", [head(1), extent(8, LEN, 0, 2 << 20, 0, own)].concat(), 0),
        (
            "nothing, for a reason",
            [words(&[5, 0, 3]), b"why".to_vec()].concat(),
            0,
        ),
        (
            "nothing now, for a reason",
            [words(&[5, u64::MAX, 3]), b"why".to_vec()].concat(),
            0,
        ),
        (
            "nothing now, and a reason without end",
            words(&[5, u64::MAX, u64::MAX]),
            0,
        ),
        ("nothing at all", words(&[u64::MAX, 0, 0]), 0),
        (
            "a region that nobody asked for",
            [words(&[6, 1, 0]), whole(own)].concat(),
            0,
        ),
        ("a group without end", head(1 << 40), 0),
        ("a reason without end", words(&[5, 0, 1 << 40]), 0),
        (
            "a kind of later releases",
            [head(1), extent(0, LEN, 0, LEN, 9, own)].concat(),
            0,
        ),
        (
            "a descriptor that did not come",
            [head(1), extent(0, LEN, 0, 2 << 20, 1, own)].concat(),
            0,
        ),
        (
            "a descriptor of something else",
            [head(1), extent(0, LEN, 0, 2 << 20, 1, own)].concat(),
            1,
        ),
        (
            "descriptors that nobody announced",
            [head(1), extent(0, LEN, 0, 2 << 20, 1, own)].concat(),
            9,
        ),
    ];
    for (what, mut answer, fds) in cases {
        if fds == 0 {
            answer.extend(words(&[u64::MAX, 0, 0]));
        }
        let error = read(answer, fds);
        let typed = [
            ErrorKind::Region,
            ErrorKind::Unsupported,
            ErrorKind::Device,
            ErrorKind::Handshake,
            ErrorKind::PeerLost,
            // Not now.
            ErrorKind::Transfer,
        ];
        assert!(typed.contains(&error.kind()), "{what}: {error:?}");
    }
}
