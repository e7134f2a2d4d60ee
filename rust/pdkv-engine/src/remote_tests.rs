//! What of a peer is known, waited for, and not waited for again.

use super::*;
use std::sync::mpsc;

fn region(id: u64) -> Arc<RemoteRegion> {
    Arc::new(RemoteRegion::new(RegionId(id), 4096, 0, true, None))
}

const LONG: Duration = Duration::from_secs(60);

fn peer() -> Remote {
    Remote::new("peer".into(), Incarnation::new([1; 16]))
}

/// Puts a question by telling its number.
fn tells(told: &mpsc::Sender<u64>) -> impl FnOnce(u64) -> Result<()> + '_ {
    |number| {
        told.send(number).unwrap();
        Ok(())
    }
}

fn found(outcome: Result<Option<Arc<RemoteRegion>>>) -> Option<RegionId> {
    outcome.unwrap().map(|region| region.id)
}

#[test]
fn an_advert_that_is_late_is_waited_for() {
    let remote = peer();
    let (told, asked) = mpsc::channel();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| remote.region(RegionId(2), LONG, tells(&told)));
        asked.recv().unwrap();
        // News of something else meanwhile.
        assert!(remote.add_region(region(1)));
        assert!(remote.add_region(region(2)));
        assert_eq!(found(waits.join().unwrap()), Some(RegionId(2)));
    });
    let known = remote.region(RegionId(1), LONG, |_| panic!("what is known needs no question"));
    assert_eq!(found(known), Some(RegionId(1)));
}

#[test]
fn what_the_peer_has_not_advertised_before_its_answer_is_not_there() {
    let remote = peer();
    let answer = |number| {
        // Pings of a heartbeat, and an answer to a question that nobody has put yet.
        remote.answered(number & !QUESTION);
        remote.answered(number);
        remote.answered(number + 1);
        Ok(())
    };
    assert_eq!(found(remote.region(RegionId(1), LONG, answer)), None);
    let (told, asked) = mpsc::channel();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| remote.region(RegionId(1), LONG, tells(&told)));
        asked.recv().unwrap();
        assert!(remote.add_region(region(1)));
        assert_eq!(found(waits.join().unwrap()), Some(RegionId(1)));
    });
}

#[test]
fn an_id_is_refused_by_the_peers_word_alone_whoever_made_ids_up_before() {
    let remote = peer();
    let answer = |number| {
        remote.answered(number);
        Ok(())
    };
    let brief = |id, ask: &dyn Fn(u64) -> Result<()>| remote.region(RegionId(id), BRIEF_WAIT, ask);
    for made_up in 100..200 {
        remote.book().in_vain = InVain::default();
        assert_eq!(found(brief(made_up, &answer)), None);
    }
    let late = brief(9, &|number| {
        assert!(remote.add_region(region(9)));
        answer(number)
    });
    assert_eq!(found(late), Some(RegionId(9)));
    // The loop has waited for as long as it may: it is not said that nobody has the id.
    remote.book().in_vain = InVain {
        since: Some(Instant::now() + LONG),
        waited: BRIEF_WAIT,
    };
    let unasked = brief(10, &|_| panic!("asked again")).map(drop).unwrap_err();
    assert_eq!(unasked.kind(), ErrorKind::TransferTimeout);
    // What came by itself is known, and who can wait asks as ever.
    assert!(remote.add_region(region(10)));
    assert_eq!(found(brief(10, &|_| panic!("it is known"))), Some(RegionId(10)));
    assert_eq!(found(remote.region(RegionId(11), LONG, answer)), None);
}

#[test]
fn what_a_loop_waits_in_vain_is_bounded_for_each_spell() {
    let begin = Instant::now();
    let at = |milliseconds| begin + Duration::from_millis(milliseconds);
    let mut in_vain = InVain::default();
    assert_eq!(in_vain.left(begin), BRIEF_WAIT);
    in_vain.add(at(0), at(1));
    in_vain.add(at(5_000), at(5_100));
    assert_eq!(in_vain.left(at(9_000)), Duration::from_millis(399));
    in_vain.add(at(9_000), at(9_700));
    assert_eq!(in_vain.left(at(9_999)), Duration::ZERO);
    assert_eq!(in_vain.left(at(10_000)), BRIEF_WAIT);
    in_vain.add(at(10_500), at(10_600));
    assert_eq!(in_vain.left(at(20_499)), Duration::from_millis(400));
}

#[test]
fn whoever_would_ask_can_know_before() {
    let remote = peer();
    let settled = |id| remote.is_settled(CacheId(id));
    assert!(!settled(3), "it would be asked for");
    assert!(remote.add_region(region(4)));
    assert!(settled(3), "an id below those that were advertised was withdrawn");
    assert!(!settled(5));
    let lost = peer();
    lost.forget_all();
    assert!(lost.is_settled(CacheId(1)));
}

#[test]
fn a_peer_that_does_not_answer_is_an_error_and_costs_its_callers_one_long_wait() {
    let remote = peer();
    let ask = |wait| {
        remote
            .region(RegionId(1), wait, |_| Ok(()))
            .map(drop)
            .unwrap_err()
            .kind()
    };
    assert_eq!(ask(Duration::from_millis(1)), ErrorKind::TransferTimeout);
    // The next one would not end within the test's time.
    assert_eq!(ask(Duration::from_secs(1 << 30)), ErrorKind::TransferTimeout);
    let lost = || Error::new(ErrorKind::PeerLost, "test", "it is gone");
    let outcome = remote.region(RegionId(1), LONG, |_| Err(lost())).map(drop);
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::PeerLost);
}

#[test]
fn nothing_is_waited_for_or_entered_once_the_peer_is_lost() {
    let remote = peer();
    assert!(remote.add_region(region(7)));
    assert!(!remote.add_region(region(7)), "known already");
    let (told, asked) = mpsc::channel();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| remote.region(RegionId(8), LONG, tells(&told)));
        asked.recv().unwrap();
        assert_eq!(remote.forget_all().len(), 1);
        assert_eq!(found(waits.join().unwrap()), None);
    });
    assert!(!remote.add_region(region(9)));
    assert_eq!(found(remote.region(RegionId(9), LONG, |_| panic!("asked"))), None);
}
