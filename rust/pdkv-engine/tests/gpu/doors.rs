//! Doors of neighbours that are slow, or fail once: no transfer stays for them, and the next one gets through.

use std::ffi::CString;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_core::id::RegionId;
use pdkv_core::reference::Reference;
use pdkv_engine::{Engine, Peer, PullOptions, RawOptions, Region, Transfer, TransportKind};

use crate::common::child::Child;
use crate::common::fake::{door, owner};
use crate::common::standin::{fail, is_here};
use crate::common::{self, BLOCK_BYTES, LEASE, Memory, WAIT, await_measurement, engine, memory, table, whole};
use crate::eventually;
use crate::forged::with_a_region;

const LEN: u64 = BLOCK_BYTES;

/// An owner of one region of a GPU, whose door is the test's.
pub(crate) struct Scene {
    reader: Engine,
    here: Region,
    peer: Peer,
    owner: std::thread::JoinHandle<()>,
}

/// What comes of a question for the region is `answer`'s.
fn scene(answer: impl FnMut(UnixStream) + Send + 'static) -> Scene {
    let mut answer = answer;
    scene_with(false, move |_, stream| answer(stream))
}

/// As [`scene`], told what is asked for; the owner's allocator may put other memory there.
pub(crate) fn scene_with(movable: bool, answer: impl FnMut(u8, UnixStream) + Send + 'static) -> Scene {
    let (listener, name) = door();
    std::thread::spawn(move || {
        let mut answer = answer;
        while let Ok((mut stream, _)) = listener.accept() {
            // Others only look who is there.
            let mut question = [0; 24 + 4 + 8];
            if stream.read_exact(&mut question).is_ok() {
                answer(question[4], stream);
            }
        }
    });
    let (address, owner) = owner(
        with_a_region(name, LEN, movable),
        |mut wire| while wire.receive().is_some() {},
    );
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
    /// Waits until nothing is launched beside what is asked for: the way to the host is measured by then.
    pub(crate) fn settle(&self) {
        await_measurement(self.here.memory().device().unwrap().gpu());
    }

    pub(crate) fn read(&self, timeout: Duration) -> Transfer {
        let (near, far) = whole(self.here.id(), RegionId(5), LEN);
        let options = RawOptions {
            timeout,
            ..RawOptions::default()
        };
        self.peer.read(&near, &far, None, &options).unwrap()
    }

    pub(crate) fn close(self) {
        self.reader.close();
        self.owner.join().unwrap();
    }
}

#[test]
fn a_lender_that_drips_holds_no_transfer_past_its_deadline() {
    if !is_here("doors::a_lender_that_drips_holds_no_transfer_past_its_deadline") {
        return;
    }
    let (tell, over) = std::sync::mpsc::channel::<()>();
    let (say, said) = std::sync::mpsc::channel();
    let mut lending = Some((over, say));
    let scene = scene(move |mut stream| {
        let (over, say) = lending.take().expect("one question");
        std::thread::spawn(move || {
            // 64 extents are to come: the first bytes of them, and then nothing until the transfer has ended.
            let mut answer: Vec<u8> = [5_u64, 64, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
            answer.resize(answer.len() + 64 * 104, 0);
            let (first, rest) = answer.split_at(100);
            stream.write_all(first).unwrap();
            over.recv().unwrap();
            // A socket takes in some hundreds of single bytes that nobody reads: all of these only where somebody reads on.
            let taken = rest.iter().take_while(|&&byte| stream.write_all(&[byte]).is_ok());
            say.send(rest.len() - taken.count()).unwrap();
        });
    });
    scene.settle();
    let transfer = scene.read(Duration::from_secs(3));
    let error = transfer.wait(WAIT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransferTimeout, "{error}");
    tell.send(()).unwrap();
    assert!(transfer.wait_quiesced(WAIT));
    let refused = said.recv_timeout(WAIT.unwrap()).expect("the door is let go of");
    assert!(refused > 0, "the answer is read to its end");
    scene.close();
}

/// Somebody whose memory can be had, and the answer that lends it, for a test's own door to give.
pub(crate) fn lender() -> (Child, Vec<u8>) {
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
    (lender, whole)
}

#[test]
fn a_door_that_fails_once_costs_one_transfer_and_not_the_way() {
    if !is_here("doors::a_door_that_fails_once_costs_one_transfer_and_not_the_way") {
        return;
    }
    let (_lender, whole) = lender();
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

/// What names memory of a kind to a neighbour.
const NAMING: [(&str, &str, Memory); 2] = [
    ("malloc", "cuIpcGetMemHandle", Memory::Malloc),
    ("segments", "cuMemExportToShareableHandle", Memory::Segments),
];

#[test]
fn a_driver_that_fails_once_to_name_memory_is_asked_again() {
    if !is_here("doors::a_driver_that_fails_once_to_name_memory_is_asked_again") {
        return;
    }
    for (kind, call, _) in NAMING {
        let mut child = Child::start("processes::child", &[("PDKV_TEST_MEMORY", kind)]);
        let named = |child: &mut Child| child.ask(&format!("calls {call}")).parse::<u32>().unwrap();
        let address = child.ask("address");
        let before = named(&mut child);
        // No room, which is of the moment.
        child.ask(&format!("fail {call} 2"));
        let engine = engine("parent", &[TransportKind::Cuda]);
        let cache = common::cache(&engine, Memory::Device);
        engine.connect(&address, Duration::from_secs(30)).unwrap();
        let export = Reference::from_json(&child.ask("export 5")).unwrap();
        eventually("it goes by the GPU all the same", || {
            let pulled = cache.pull(&export, table(&[1]), &PullOptions::default());
            match pulled.and_then(|transfer| transfer.wait(WAIT)) {
                Ok(()) => true,
                Err(error) => {
                    assert!(error.message().contains("can't share region"), "{error}");
                    assert!(error.message().contains(&format!("`{call}` returned `2`")), "{error}");
                    false
                }
            }
        });
        assert!(named(&mut child) >= before + 2, "the failure was somebody else's");
    }
}

#[test]
fn a_driver_that_fails_to_name_memory_as_it_is_registered_seals_nothing() {
    if !is_here("doors::a_driver_that_fails_to_name_memory_as_it_is_registered_seals_nothing") {
        return;
    }
    for (_, call, kind) in NAMING {
        let call = CString::new(call).unwrap();
        let engine = engine("parent", &[TransportKind::Cuda]);
        for (status, shared) in [(2, true), (801, false)] {
            fail(&call, 1, status);
            let region = engine.register(memory(kind, LEN), None, true).unwrap();
            assert_eq!(region.is_shared(), shared, "{status}");
        }
        fail(&call, 1, 2);
        let cache = common::cache(&engine, kind);
        let offer = cache.offer(table(&[4]), 4, b"", LEASE).unwrap();
        let mut child = Child::start("processes::child", &[]);
        let push = format!("push {} {} 8", engine.address().unwrap(), offer.reference().to_json());
        assert_eq!(child.ask(&push), "pushing");
        eventually("it is written to", || {
            common::read(&cache, cache.memory(), 0, 4) == common::expected(1, 0, 8)
        });
        // What is never to be had is told at once.
        fail(&call, 0, 801);
        let sealed = common::cache(&engine, kind);
        let offer = sealed.offer(table(&[4]), 4, b"", LEASE).unwrap();
        let push = format!(
            "refused {} {} 8",
            engine.address().unwrap(),
            offer.reference().to_json()
        );
        let reason = child.ask(&push);
        assert!(reason.contains("returned `801`"), "{reason}");
    }
}
