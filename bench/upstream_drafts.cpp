// What llama.cpp drafts at every position of a given text, one line of token ids each: `IDS.txt FROM` and then the options of
// llama-speculative-simple. The text is fed as it is: nothing is sampled, no draft is verified.

#include "arg.h"
#include "common.h"
#include "log.h"
#include "llama.h"
#include "speculative.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

int main(int argc, char ** argv) {
    if (argc < 3) {
        return 2;
    }
    std::ifstream file(argv[1]);
    llama_tokens ids;
    for (llama_token id; file >> id;) {
        ids.push_back(id);
    }
    const int from = std::atoi(argv[2]);
    argv[2] = argv[0];

    common_params params;
    common_init();
    if (!common_params_parse(argc - 2, argv + 2, params, LLAMA_EXAMPLE_SPECULATIVE)) {
        return 2;
    }
    llama_backend_init();
    const auto limits = common_speculative_get_output_limits(params.n_batch, 1, common_speculative_n_max(&params.speculative));
    params.n_outputs_max         = limits.total;
    params.n_outputs_max_per_seq = limits.per_seq;

    auto target = common_init_from_params(params);
    llama_context * ctx = target->context();
    common_params with_draft = common_base_params_to_speculative(params);
    auto draft = common_speculative_init_from_params(with_draft, target->model(), ctx);
    params.speculative.draft.ctx_tgt = ctx;
    params.speculative.draft.ctx_dft = draft->context();
    common_speculative * spec = common_speculative_init(params.speculative, 1);
    if (!spec) {
        return 1;
    }
    common_batch batch(ctx);
    auto feed = [&](int begin, int end) {
        batch.clear();
        for (int i = begin; i < end; i++) {
            batch.add(ids[i], i, 0, end - begin == 1);
        }
        llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get());
        return common_speculative_process(spec, batch);
    };
    llama_tokens prompt(ids.begin(), ids.begin() + from);
    if (!feed(0, from)) {
        return 1;
    }
    common_speculative_begin(spec, 0, prompt);
    for (int i = from; i < (int) ids.size(); i++) {
        llama_tokens drafted;
        common_speculative_get_draft_params(spec, 0) = { true, 64, i, ids[i], &prompt, &drafted };
        common_speculative_draft(spec);
        for (auto id : drafted) {
            printf("%d ", id);
        }
        printf("\n");
        llama_memory_seq_rm(llama_get_memory(draft->context()), 0, i, -1);
        if (!feed(i, i + 1)) {
            return 1;
        }
        prompt.push_back(ids[i]);
    }
    common_speculative_free(spec);
    return 0;
}
