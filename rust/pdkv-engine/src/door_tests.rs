//! Doors behind which nobody answers, or somebody that was not expected.

use std::cell::Cell;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use pdkv_device::HugePages;

use super::*;
use crate::local::listen;

const TOKEN: SessionToken = SessionToken::new([1; 16]);

/// Stops at the so-manieth look.
fn at_look(number: u32) -> impl Fn() -> bool {
    let looks = Cell::new(0);
    move || {
        looks.set(looks.get() + 1);
        looks.get() >= number
    }
}

/// A door whose queue is full: nobody is let in, and nobody is turned away.
fn full() -> (OwnedFd, LocalDoor, Vec<UnixStream>) {
    let name = format!("{NAME_PREFIX}{:032x}", u128::from(std::process::id()));
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let door = LocalDoor::find(&name, TOKEN, &|| false).unwrap();
    (socket, door, Vec::new())
}

#[test]
fn nobody_waits_at_a_full_door_past_the_moment_of_being_told_to_stop() {
    let (_owner, door, _) = full();
    let error = door.stream(&at_look(3)).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransferCancelled, "{error}");
    let error = door.map(&[(RegionId(1), 4096)], &at_look(3), |_, _| {}).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransferCancelled, "{error}");
    // Of itself it gives up too.
    let error = LocalDoor::find(&door.name, TOKEN, &|| false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerUnreachable, "{error}");
    assert!(error.message().contains("lets nobody in"), "{error}");
}

#[test]
fn nobody_waits_for_a_peer_that_is_lost() {
    let (listener, name) = listen().unwrap();
    let door = LocalDoor::find(&name, TOKEN, &|| false).unwrap();
    let other = door.clone();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| door.map(&[(RegionId(1), 4096)], &|| false, |_, _| {}).unwrap_err());
        other.shut();
        assert_eq!(waits.join().unwrap().kind(), ErrorKind::PeerLost);
    });
    drop(listener);
}

#[test]
fn only_names_that_we_give_are_connected_to() {
    let taken = |name: &str| LocalDoor::find(name, TOKEN, &|| false).map(|door| door.pid());
    let (_ours, name) = listen().unwrap();
    assert_eq!(taken(&name).unwrap(), std::process::id());
    let long = format!("{name}0");
    for foreign in [
        "containerd-shim",
        "pdkv-",
        "",
        &long,
        &name[..name.len() - 1],
        &name.to_uppercase(),
    ] {
        let listener = SocketAddr::from_abstract_name(foreign).and_then(|address| UnixListener::bind_addr(&address));
        let error = taken(foreign).unwrap_err();
        assert!(error.message().contains("its name"), "{foreign}: {error}");
        if let Ok(listener) = listener {
            listener.set_nonblocking(true).unwrap();
            assert!(listener.accept().is_err(), "{foreign}: somebody came");
        }
    }
}

#[test]
fn a_door_that_another_process_has_taken_over_is_not_the_peers() {
    let (_owner, name) = listen().unwrap();
    let mut door = LocalDoor::find(&name, TOKEN, &|| false).unwrap();
    door.pid += 1;
    let error = door.stream(&|| false).map(drop).unwrap_err();
    assert!(error.message().contains("another process"), "{error}");
}

/// Whoever answers one question for a region of 4 KiB, number 5.
fn owner<T: Send + 'static>(
    answer: impl FnOnce(UnixStream) -> T + Send + 'static,
) -> (LocalDoor, std::thread::JoinHandle<T>) {
    let (listener, name) = listen().unwrap();
    listener.set_nonblocking(false).unwrap();
    let door = LocalDoor::find(&name, TOKEN, &|| false).unwrap();
    let thread = std::thread::spawn(move || {
        // The first only looked who is there.
        drop(listener.accept().unwrap());
        let (stream, _) = listener.accept().unwrap();
        let mut question = [0; HELLO + 4 + 8];
        let never = AtomicBool::new(false);
        pdkv_device::recv_exact(stream.as_fd(), &mut question, &never).unwrap();
        answer(stream)
    });
    (door, thread)
}

fn entry(len: u64) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    entry[0] = 5;
    entry[16..24].copy_from_slice(&len.to_le_bytes());
    entry
}

#[test]
fn a_region_that_is_handed_out_twice_ends_the_mapping() {
    let (door, owner) = owner(|stream| {
        let memory = HostRegion::allocate(4096, HugePages::Never).unwrap();
        let fd = memory.shared().unwrap().fd;
        // Until the other end has had enough.
        let (mut sent, never) = (0, AtomicBool::new(false));
        while pdkv_device::send_fds(stream.as_fd(), &[fd], &entry(4096), &never).is_ok() {
            sent += 1;
        }
        sent
    });
    let mut settled = Vec::new();
    let wanted = [(RegionId(5), 4096)];
    let error = door
        .map(&wanted, &|| false, |id, outcome| settled.push((id, outcome.is_ok())))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Handshake);
    assert_eq!(settled, [(RegionId(5), true)]);
    assert!(owner.join().unwrap() > 0);
}

#[test]
fn a_region_of_which_there_are_no_pages_is_refused_alone() {
    let (door, owner) = owner(|stream| {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
        let fd = memfd_create("sparse", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 64 << 20).unwrap();
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        let never = AtomicBool::new(false);
        pdkv_device::send_fds(stream.as_fd(), &[fd.as_fd()], &entry(64 << 20), &never).unwrap();
        pdkv_device::send_exact(stream.as_fd(), &END, &never).unwrap();
        rustix::fs::fstat(&fd).unwrap().st_blocks
    });
    let mut kinds = Vec::new();
    door.map(&[(RegionId(5), 64 << 20)], &|| false, |_, outcome| {
        kinds.push(outcome.map(drop).unwrap_err().kind());
    })
    .unwrap();
    assert_eq!(kinds, [ErrorKind::Region]);
    assert_eq!(owner.join().unwrap(), 0, "pages came to be");
}

#[test]
fn who_is_told_that_there_are_too_many_asks_again_unless_it_is_to_stop() {
    let (_listener, name) = listen().unwrap();
    let door = LocalDoor::find(&name, TOKEN, &|| false).unwrap();
    let count = Cell::new(0);
    let asked = &count;
    let asks = |full: u32, then: ErrorKind| {
        asked.set(0);
        move || {
            asked.set(asked.get() + 1);
            if asked.get() <= full {
                Err::<(), _>(turned_away())
            } else {
                Err(Error::new(then, "test", "over"))
            }
        }
    };
    let error = door.in_turn(&|| false, asks(2, ErrorKind::PeerLost)).unwrap_err();
    assert_eq!((error.kind(), asked.get()), (ErrorKind::PeerLost, 3));
    let error = door
        .in_turn(&at_look(2), asks(u32::MAX, ErrorKind::PeerLost))
        .unwrap_err();
    assert_eq!((error.kind(), asked.get()), (ErrorKind::Capacity, 2));
    door.shut();
    let error = door
        .in_turn(&|| false, asks(u32::MAX, ErrorKind::PeerLost))
        .unwrap_err();
    assert_eq!((error.kind(), asked.get()), (ErrorKind::Capacity, 1));
}
