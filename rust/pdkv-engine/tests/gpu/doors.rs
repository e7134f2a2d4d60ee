//! Doors of neighbours that are slow, or fail once: no transfer stays for them, and the next one gets through.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_core::id::RegionId;
use pdkv_engine::{Engine, LocalSpan, Peer, RawOptions, Region, RemoteSpan, Transfer, TransportKind};

use crate::common::child::Child;
use crate::common::fake::owner;
use crate::common::standin::is_here;
use crate::common::{self, BLOCK_BYTES, Memory, WAIT, engine, memory};
use crate::forged::with_a_region;

const LEN: u64 = BLOCK_BYTES;

/// An owner of one region of a GPU, whose door is the test's.
struct Scene {
    reader: Engine,
    here: Region,
    peer: Peer,
    owner: std::thread::JoinHandle<()>,
}

/// What comes of a question for the region is `answer`'s.
fn scene(answer: impl FnMut(UnixStream) + Send + 'static) -> Scene {
    static DOORS: AtomicUsize = AtomicUsize::new(0);
    let number = DOORS.fetch_add(1, Ordering::Relaxed);
    let name = format!("pdkv-door-{}-{number}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    std::thread::spawn(move || {
        let mut answer = answer;
        while let Ok((mut stream, _)) = listener.accept() {
            // Others only look who is there.
            if stream.read_exact(&mut [0; 24 + 4 + 8]).is_ok() {
                answer(stream);
            }
        }
    });
    let (address, owner) = owner(with_a_region(name, LEN), |mut wire| while wire.receive().is_some() {});
    let reader = engine("reader", &[TransportKind::Cuda]);
    let peer = reader.connect(&address, Duration::from_secs(30)).unwrap();
    // Its first memory of a GPU, after the owner's was heard of: nobody asks at the door before the transfer does.
    let here = reader.register(memory(Memory::Device, LEN), None, true).unwrap();
    Scene {
        reader,
        here,
        peer,
        owner,
    }
}

impl Scene {
    fn read(&self, timeout: Duration) -> Transfer {
        let near = LocalSpan {
            region: self.here.id(),
            offset: 0,
            len: LEN,
        };
        let far = RemoteSpan {
            region: RegionId(5),
            offset: 0,
            len: LEN,
        };
        let options = RawOptions {
            timeout,
            ..RawOptions::default()
        };
        self.peer.read(&[near], &[far], None, &options).unwrap()
    }

    fn close(self) {
        self.reader.close();
        self.owner.join().unwrap();
    }
}

#[test]
fn a_lender_that_drips_holds_no_transfer_past_its_deadline() {
    if !is_here("doors::a_lender_that_drips_holds_no_transfer_past_its_deadline") {
        return;
    }
    let (left, gone) = std::sync::mpsc::channel();
    let scene = scene(move |mut stream| {
        let left = left.clone();
        std::thread::spawn(move || {
            let mut head = Vec::new();
            for word in [5_u64, 64, 0] {
                head.extend(word.to_le_bytes());
            }
            // Each byte in time, and no end of them.
            let mut all = head.into_iter().chain(std::iter::repeat(0));
            while let Some(byte) = all.next()
                && stream.write_all(&[byte]).is_ok()
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            let _ = left.send(());
        });
    });
    let transfer = scene.read(Duration::from_millis(300));
    let error = transfer.wait(WAIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransferTimeout, "{error}");
    assert!(transfer.wait_quiesced(WAIT));
    gone.recv_timeout(Duration::from_secs(60))
        .expect("the reader lets go of the door");
    scene.close();
}

#[test]
fn a_door_that_fails_once_costs_one_transfer_and_not_the_way() {
    if !is_here("doors::a_door_that_fails_once_costs_one_transfer_and_not_the_way") {
        return;
    }
    // Somebody whose memory can be had; the names are passed on by this test's door.
    let mut lender = Child::start("processes::child", &[("PDKV_TEST_MEMORY", "malloc")]);
    let named = lender.ask("name");
    let words: Vec<&str> = named.split_whitespace().collect();
    let [offset, allocation, name] = words[..] else {
        panic!("{named}")
    };
    let (offset, allocation): (u64, u64) = (offset.parse().unwrap(), allocation.parse().unwrap());
    let mut whole = Vec::new();
    for word in [5, 1, 0, 0, LEN, offset, allocation, 0] {
        whole.extend(word.to_le_bytes());
    }
    whole.extend(pdkv_core::hex::decode(name).unwrap());
    for word in [u64::MAX, 0, 0] {
        whole.extend(word.to_le_bytes());
    }
    let broken = Arc::new(AtomicBool::new(true));
    let state = Arc::clone(&broken);
    let scene = scene(move |mut stream| {
        if !state.load(Ordering::Acquire) {
            let _ = stream.write_all(&whole);
        }
    });
    let error = scene.read(Duration::from_secs(30)).wait(WAIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    broken.store(false, Ordering::Release);
    let transfer = scene.read(Duration::from_secs(30));
    transfer.wait(WAIT).unwrap();
    assert_eq!(transfer.path().transport, TransportKind::Cuda);
    let mut got = vec![0; LEN as usize];
    scene.here.memory().read_at(0, &mut got).unwrap();
    assert_eq!(got, common::expected(1, 0, 0));
    scene.close();
}
