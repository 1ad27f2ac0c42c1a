tmux kill-session -t suite_s 2>/dev/null
tmux new-session -d -s suite_s -x 110 -y 40 "bash -c 'source /tmp/w/wt/suite.env; unset CI; cd /tmp/w/suite; rm -rf c1; npugraph-ex conformance --jobs 1 --report-dir c1 -k \"memory or one_pool or every_form or test_planted\"; echo EXIT \$?; sleep 60'"
sleep 25; tmux capture-pane -p -t suite_s | tail -15; tmux send-keys -t suite_s C-c; sleep 8; tmux capture-pane -p -t suite_s | tail -30; ls -la c1
